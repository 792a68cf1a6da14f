# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Expected answers for which a reward can hardly be earned, and what the user is told."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.rewards.gold_answers import (
    Example,
    answer_warnings,
    number_in_prose,
    unearnable_warning,
)
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


def examples_of(answers: Sequence[Any]) -> list[Example]:
    ids = np.array([1], np.int32)
    rows = [{} if answer is ... else {"answer": answer} for answer in answers]
    return [
        Example(f"train.jsonl:{i + 1}", Prompt(i, "6*7?", ids, row)) for i, row in enumerate(rows)
    ]


def warnings_for(functions: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Says what the user is told of each function in turn."""

    async def run() -> list[str]:
        pool = RewardPool(
            functions, num_workers=1, timeout_seconds=60.0, max_consecutive_failures=1
        )
        rows = examples_of(answers)
        try:
            await pool.start()
            found = [
                await answer_warnings(pool, position, rows, "prompts.path", len, 99)
                for position in range(len(functions))
            ]
            return ["".join(warnings) for warnings in found]
        finally:
            await pool.close()

    return asyncio.run(run())


def test_the_user_is_told_where_the_right_number_earns_nothing():
    answers = ["42", "There are 42 left", "The answer is 42.", "So 7 of them stay"]
    boxed, exact, partial = warnings_for(["boxed_math", "exact_match", "partial_match"], answers)
    assert boxed.startswith(
        "prompts.path: the column 'answer' holds words around a number in 2 of the first 4 rows, "
        "and boxed_math gives no reward for the number alone. For example, the completion "
        r"'\\boxed{42}' earns 0 in train.jsonl:2, whose answer is 'There are 42 left'."
    )
    assert "prompts.rename" in boxed
    assert "in 3 of the first 4 rows" in exact
    assert "'42' earns 0 in train.jsonl:2" in exact
    assert partial == ""


def test_nothing_is_said_of_answers_that_are_read():
    answers = ["42", "42 apples", "Tom has 6*7 apples.\n#### 42", r"so \boxed{42}", "Answer: 42"]
    assert warnings_for(["boxed_math"], answers) == [""]
    assert warnings_for(["exact_match"], ["4321", "Paris", "two words"]) == [""]
    assert warnings_for(["boxed_math"], []) == [""]


def unearnable(function: str, answers: list[Any]) -> str | None:
    """Returns the warning where each character is a token and 6 may be written."""
    return unearnable_warning(function, examples_of(answers), "prompts.path", len, 6)


@pytest.mark.parametrize("answer", ["", "  ", None, ...])
def test_an_empty_answer_is_reported_with_its_row_and_the_remedy(answer):
    for function in ("exact_match", "partial_match", "boxed_math"):
        found = unearnable(function, ["1", answer, answer]) or ""
        assert found.startswith(f"prompts.path: {function} cannot be earned in 2 of the first 3")
        assert "'answer' is empty in 2 of them (for example in train.jsonl:2)" in found
        assert "prompts.rename" in found


def test_an_answer_longer_than_the_longest_completion_is_reported():
    assert unearnable("exact_match", ["123456"]) is None
    found = unearnable("exact_match", [" 1234567 ", "1"]) or ""
    assert "longer than rollout.max_new_tokens (6) in 1 of them" in found
    # The mark before the answer counts.
    assert unearnable("boxed_math", ["So it is.\n#### 12"]) is None
    assert unearnable("boxed_math", ["123"]) is not None


def test_what_can_be_earned_in_part_or_by_an_own_rule_is_not_reported():
    assert unearnable("partial_match", ["1234567"]) is None
    assert unearnable("rewards.py:mine", [""]) is None
    assert unearnable("think_answer_tags", [...]) is None
