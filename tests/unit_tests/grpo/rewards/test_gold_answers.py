# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Expected answers that are prose: which are noticed, and what the user is told."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from torchtitan.grpo.rewards.gold_answers import Example, number_in_prose, prose_warning
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.types import Prompt


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("There are 42 apples", "42"),
        ("The answer is 42", "42"),
        ("42 because 6*7 is -42", "-42"),
        ("about 1,234.5 dollars", "1,234.5"),
        ("There are 12 feet and 3 inches", "3"),
        ("答案是42", "42"),
        ("42", None),
        ("x = 42", None),
        ("Paris", None),
        ("3 or 4", None),
        (r"\frac{1}{2}", None),
        (r"5 \text{ square meters}", None),
        ("sin 30 + log 5", None),
        ("2x^2 + 3y", None),
        ("", None),
    ],
)
def test_number_in_prose_tells_prose_from_mathematics(answer, number):
    assert number_in_prose(answer) == number


def warnings_for(functions: Sequence[str], answers: Sequence[str]) -> list[str | None]:
    """What is said of each function in turn, for a set with these answers."""

    async def run() -> list[str | None]:
        pool = RewardPool(
            functions, num_workers=1, timeout_seconds=60.0, max_consecutive_failures=1
        )
        ids = np.array([1], np.int32)
        examples = [
            Example(f"train.jsonl:{i + 1}", Prompt(i, "6*7?", ids, {"answer": answer}))
            for i, answer in enumerate(answers)
        ]
        try:
            await pool.start()
            return [
                await prose_warning(pool, position, examples, "prompts.path")
                for position in range(len(functions))
            ]
        finally:
            await pool.close()

    return asyncio.run(run())


def test_the_user_is_told_where_the_right_number_earns_nothing():
    answers = ["42", "There are 42 left", "The answer is 42.", "So 7 of them stay"]
    boxed, exact, partial = warnings_for(["boxed_math", "exact_match", "partial_match"], answers)
    assert boxed is not None and boxed.startswith(
        "prompts.path: the column 'answer' holds words around a number in 2 of the first 4 rows, "
        "and boxed_math gives no reward for the number alone. For example, the completion "
        r"'\\boxed{42}' earns 0 in train.jsonl:2, whose answer is 'There are 42 left'."
    )
    assert "prompts.rename" in boxed
    assert exact is not None and "in 3 of the first 4 rows" in exact
    assert "'42' earns 0 in train.jsonl:2" in exact
    assert partial is None


def test_nothing_is_said_of_answers_that_are_read():
    answers = ["42", "42 apples", "Tom has 6*7 apples.\n#### 42", r"so \boxed{42}", "Answer: 42"]
    assert warnings_for(["boxed_math"], answers) == [None]
    assert warnings_for(["exact_match"], ["4321", "Paris", "two words"]) == [None]
    assert warnings_for(["boxed_math"], []) == [None]
