# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions for GSM8K's answer form, a last line `#### <number>`, in TRL's signature.

The column ``answer`` holds the number, alone or behind a worked solution and `####`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from torchtitan.grpo.rewards.builtin import Completion, completion_text
from torchtitan.grpo.rewards.gold_values import right_answers

CONTAINS_CREDIT = 0.5
"""Reward for a well-formed `####` line that does not stand alone at the end."""

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_HASH_LINE = re.compile(rf"^####[ ]+({_NUMBER})[ ]*$", re.MULTILINE)


def hash_answer_format(
    prompts: Sequence[Any], completions: Sequence[Completion], **_: Any
) -> list[float]:
    r"""Returns 1 if the only `#### <number>` line is the last line, 1/2 if there is such a line.

    Example: ``She has 2 + 3 = 5 apples.\n#### 5`` earns 1; with a further sentence below, or
    with a second `#### 5` line, 1/2; ``The answer is 5`` and ``#### five`` earn 0.
    """
    return [_format_reward(completion_text(completion)) for completion in completions]


def hash_answer_exact(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns 1 if the last `#### <number>` line has the expected number, else 0.

    Thousands commas and a dollar sign are ignored, and ``5.0`` is ``5``. If the answer is a list, any
    element counts. Without an answer, returns ``None``. Raises ValueError if an expected answer holds
    no number.
    """
    expected = [[_expected_number(text) for text in right_answers(value)] for value in answer]
    found = [_HASH_LINE.findall(completion_text(completion)) for completion in completions]
    return [
        float(bool(lines) and _to_number(lines[-1]) in numbers) if numbers else None
        for lines, numbers in zip(found, expected, strict=True)
    ]


def _format_reward(text: str) -> float:
    lines = list(_HASH_LINE.finditer(text))
    if not lines:
        return 0.0
    alone_at_the_end = len(lines) == 1 and not text[lines[0].end() :].strip()
    return 1.0 if alone_at_the_end else CONTAINS_CREDIT


def _expected_number(answer: str) -> Decimal:
    number = answer.rpartition("####")[2].strip()
    if not re.fullmatch(_NUMBER, number):
        raise ValueError(
            "The answer column must hold a number, alone or after the last ####, got "
            f"{answer!r}. Check prompts.path and prompts.rename."
        )
    return _to_number(number)


def _to_number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
