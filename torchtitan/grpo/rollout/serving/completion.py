# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The record that the dispatcher keeps of one completion in flight."""

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
        floor: Oldest policy version that may generate the completion.
        expected_tokens: Number of tokens that are expected to be generated.
        jobs: The completion's job on each server that is generating it. There are two if the
            completion is hedged, and none while it waits for a server.
        allowed: Returns whether a server may generate this completion of an evaluation. It is
            ``None`` for a rollout, which any server may generate.
    """

    prompt: Prompt
    sampling: Sampling
    floor: int
    expected_tokens: float
    jobs: dict[Server, Job] = field(default_factory=dict)
    allowed: Callable[[Server], bool] | None = None

    @property
    def is_evaluation(self) -> bool:
        """Whether the completion belongs to an evaluation.

        An evaluation uses only capacity that rollouts leave free.
        """
        return self.allowed is not None
