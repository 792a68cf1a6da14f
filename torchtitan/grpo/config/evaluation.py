# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[evaluation]`` table: scoring of held-out prompts during a run."""

from dataclasses import dataclass


@dataclass
class Evaluation:
    """``[evaluation]``: held-out prompts, decoded greedily."""

    path: str | None = None
    """Held-out prompts, in the form of ``prompts.path``; None evaluates nothing."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several; not used for JSONL."""

    split: str = "test"
    """Split of a Hugging Face data set; not used for JSONL."""

    num_prompts: int = 256
    """The first this many rows are used; 0 is all."""

    function: str = "exact_match"
    """Reward function whose mean is reported as ``evaluation/score``."""

    interval: int = 0
    """Evaluate every this many steps, besides before the first and after the last; 0 is
    only those two."""
