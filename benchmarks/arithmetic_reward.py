# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The reward of the arithmetic task, for this trainer and for TRL (`against_trl.py`)."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d+")
MOST_DIGITS = 30


def right_digits(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Returns the share of right digits of each completion's last number; 1 if it is the answer.

    Digits are compared by their places: 126 has two of the three digits of 128, and so has 28.
    """
    return [_share(_text(c), expected) for c, expected in zip(completions, answer, strict=True)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _share(text: str, expected: str) -> float:
    found = NUMBER.findall(text.replace(",", ""))
    given = found[-1] if found else ""
    if not given or len(given) > MOST_DIGITS or given.startswith("-"):
        return 0.0
    length = max(len(given), len(expected))
    pairs = zip(given.rjust(length), expected.rjust(length), strict=True)
    return sum(one == other for one, other in pairs) / length
