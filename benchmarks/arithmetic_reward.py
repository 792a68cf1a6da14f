# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The reward of the arithmetic task, for this trainer and for TRL (`against_trl.py`)."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Returns 1 for each completion whose last number is the answer, and 0 for the others."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = NUMBER.findall(text.replace(",", ""))
        rewards.append(float(bool(numbers) and float(numbers[-1]) == float(expected)))
    return rewards
