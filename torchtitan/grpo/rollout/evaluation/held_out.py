# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One opened set of held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import Prompt


@dataclass(frozen=True)
class HeldOut:
    """One set of held-out prompts, and what its completions are generated and scored with.

    Attributes:
        name: Name of the set.
        settings: Its settings.
        prompts: The prompts that are used.
        function: Position of the set's reward function in the pool.
        writer: Generates the completions, with the sampling settings of the set.
    """

    name: str
    settings: EvaluationSet
    prompts: Sequence[Prompt]
    function: int
    writer: TrajectoryWriter
