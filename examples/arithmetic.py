# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rewards for whole numbers that are nearly right.

A model that is right in one of ten samples learns slowly from a reward of 0 or 1. These functions also tell wrong
answers apart. `train_configs/smollm2_arithmetic.toml` adds the first one to `last_number`:

    functions = ["last_number", "examples/arithmetic.py:right_digits"]
    weights = [1.0, 0.3]
"""

from torchtitan.grpo.rewards.builtin import completion_text
from torchtitan.grpo.rewards.final_answers import numbers_in

HALF_WAY = 4
"""An answer that is wrong by so much has a nearness of 0.5."""
MOST_DIGITS = 28
"""A longer number has no right digits; decimal arithmetic is exact up to here."""


def right_digits(completions, answer, **kwargs) -> list[float]:
    """Returns the share of right digits of each completion's last number, in [0, 1].

    Digits are compared by their places: 126 has two of the three digits of 128, and so has 28. A completion without a
    whole number has 0, and so has one whose number has the wrong sign.
    """
    return [share_of_digits(*pair) for pair in pairs_of(completions, answer)]


def nearness(completions, answer, **kwargs) -> list[float]:
    """Returns 1 for the right number, less the more the last number differs from it, and 0 without one."""
    return [near(*pair) for pair in pairs_of(completions, answer)]


def pairs_of(completions, answer) -> list[tuple[str, str]]:
    """Returns the text of each completion, which may be a list of messages, and its right answer."""
    return [
        (completion_text(c), str(wanted)) for c, wanted in zip(completions, answer, strict=True)
    ]


def share_of_digits(text: str, wanted: str) -> float:
    numbers = numbers_in(text)[-1:]
    if not numbers or numbers[0].adjusted() >= MOST_DIGITS or numbers[0] % 1:
        return 0.0
    given = str(int(numbers[0]))
    if given.startswith("-") != wanted.startswith("-"):
        return 0.0
    given, wanted = given.lstrip("-"), wanted.lstrip("-")
    length = max(len(given), len(wanted))
    pairs = zip(given.rjust(length), wanted.rjust(length), strict=True)
    return sum(one == other for one, other in pairs) / length


def near(text: str, wanted: str) -> float:
    numbers = numbers_in(text)[-1:]
    return 1 / (1 + abs(float(numbers[0]) - float(wanted)) / HALF_WAY) if numbers else 0.0
