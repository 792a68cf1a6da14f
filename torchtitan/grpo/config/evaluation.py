# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[evaluation]`` table: scoring of held-out prompts during a run."""

from dataclasses import dataclass
from typing import Annotated

from torchtitan.grpo.config.bounds import at_least


@dataclass
class Evaluation:
    """``[evaluation]``: held-out prompts, whose completions are sampled greedily and scored."""

    path: str | None = None
    """Held-out prompts, in the same form as ``prompts.path``. None evaluates nothing."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several. Not used for files."""

    split: str = "test"
    """Split of a Hugging Face data set. Not used for files."""

    num_prompts: Annotated[int, at_least(1).or_value(0, "all rows")] = 256
    """Number of rows to evaluate, counted from the beginning of the set."""

    function: str = "exact_match"
    """Reward function, named as in ``reward.functions``, whose mean is reported as
    ``evaluation/score``."""

    interval: Annotated[int, at_least(1).or_value(0, "only at the start and the end")] = 0
    """Number of steps between two evaluations. The run also evaluates before its first and after
    its last step."""
