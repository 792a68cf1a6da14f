# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rewards that no completion can earn are found before training."""

from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.rewards.earnable import unearnable_warning
from torchtitan.grpo.rewards.gold_answers import Example
from torchtitan.grpo.types import Prompt


def warning(function: str, answers: list[Any], max_new_tokens: int = 6) -> str | None:
    """The warning for rows with these answers, where each character is a token."""
    rows = [{} if answer is ... else {"answer": answer} for answer in answers]
    examples = [
        Example(f"rows.jsonl:{i + 1}", Prompt(i, "?", np.array([1], np.int32), columns))
        for i, columns in enumerate(rows)
    ]
    return unearnable_warning(function, examples, "prompts.path", len, max_new_tokens)


@pytest.mark.parametrize("answer", ["", "  ", None, ...])
def test_an_empty_answer_is_reported_with_its_row_and_the_remedy(answer):
    for function in ("exact_match", "partial_match", "boxed_math"):
        found = warning(function, ["1", answer, answer])
        assert found is not None
        assert found.startswith(f"prompts.path: {function} cannot be earned in 2 of the first 3")
        assert "'answer' is empty in 2 of them (for example in rows.jsonl:2)" in found
        assert "prompts.rename" in found


def test_an_answer_longer_than_the_longest_completion_is_reported():
    assert warning("exact_match", ["123456"]) is None
    found = warning("exact_match", [" 1234567 ", "1"])
    assert found is not None
    assert "longer than rollout.max_new_tokens (6) in 1 of them" in found
    # The mark before the answer counts.
    assert warning("boxed_math", ["So it is.\n#### 12"]) is None
    assert warning("boxed_math", ["123"]) is not None


def test_what_can_be_earned_in_part_or_by_an_own_rule_is_not_reported():
    assert warning("partial_match", ["1234567"]) is None
    assert warning("rewards.py:mine", [""]) is None
    assert warning("think_answer_tags", [...]) is None
