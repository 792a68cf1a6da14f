# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Expected answers for which a reward cannot be earned, and what the user is told."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.rewards.gold_answers import Example, unearnable_warning
from torchtitan.grpo.types import Prompt


def examples_of(answers: Sequence[Any]) -> list[Example]:
    ids = np.array([1], np.int32)
    rows = [{} if answer is ... else {"answer": answer} for answer in answers]
    return [
        Example(f"train.jsonl:{i + 1}", Prompt(i, "6*7?", ids, row)) for i, row in enumerate(rows)
    ]


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
