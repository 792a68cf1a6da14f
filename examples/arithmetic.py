# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A reward for whole numbers that are partly right, for `train_configs/smollm2_arithmetic.toml`."""

import re

HALF_WAY = 4


def right_digits(completions, answer, **kwargs) -> list[float]:
    """Returns the share of right digits of each completion's last number, in [0, 1].

    Digits are compared by their places: of 128, the answer 126 has two of three digits, and 28 has none of the
    hundreds' digit. A completion without a number has 0.
    """
    return [share_of_digits(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def share_of_digits(text: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", text)
    if not numbers:
        return 0.0
    length = max(len(numbers[-1]), len(wanted))
    pairs = zip(numbers[-1].rjust(length), wanted.rjust(length), strict=True)
    return sum(given == right for given, right in pairs) / length


def nearness(completions, answer, **kwargs) -> list[float]:
    """Returns 1 for the right number, 0.5 for one that is wrong by ``HALF_WAY``, and 0 without a number."""
    return [near(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def near(text: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", text)
    return 1 / (1 + abs(int(numbers[-1]) - int(wanted)) / HALF_WAY) if numbers else 0.0
