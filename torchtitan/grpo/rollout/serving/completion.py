# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion, as the dispatcher follows it from its submission to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Job, Server
from torchtitan.grpo.types import Prompt


@dataclass(eq=False)
class Completion:
    """One completion, from submission to its end.

    Attributes:
        prompt: The prompt to answer.
        sampling: Sampling settings.
        floor: Oldest policy version that may generate it.
        expected_tokens: Number of tokens that are expected to be generated.
        jobs: Its job on each server that is generating it: none, one, or two if it is hedged.
        allowed: Whether a server may generate a completion of an evaluation. ``None`` for a
            rollout, which any server may generate.
    """

    prompt: Prompt
    sampling: Sampling
    floor: int
    expected_tokens: float
    jobs: dict[Server, Job] = field(default_factory=dict)
    allowed: Callable[[Server], bool] | None = None

    @property
    def is_evaluation(self) -> bool:
        """Whether it belongs to an evaluation, which gets what rollouts leave free."""
        return self.allowed is not None
