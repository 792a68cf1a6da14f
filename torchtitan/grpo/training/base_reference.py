# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The reference of a policy that is trained by adapters: the policy itself, with adapters off."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.lora import adapters_off
from torchtitan.grpo.training.runner import ForwardRunner, ModelRunner
from torchtitan.grpo.training.stage_runner import PipelineForwardRunner, PipelineRunner


class BaseReference(ForwardRunner):
    """Computes logprobs under the base model, which is in memory already.

    Args:
        runner: Runs the policy's parts forward.
        parts: Parts of the policy that this rank holds.
    """

    def __init__(self, runner: ForwardRunner, parts: Sequence[nn.Module]) -> None:
        self._runner, self._parts = runner, list(parts)
        self.has_output, self.stages = runner.has_output, runner.stages

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        with adapters_off(self._parts):
            return self._runner.forward(rows)

    def follow(self, policy_parts: Sequence[nn.Module]) -> None:
        """Does nothing: the base never moves."""

    def checkpoint_state(self) -> dict[str, Stateful]:
        """Returns no state: the base is in ``model.hf_assets_path``."""
        return {}


def base_reference(
    policy: ModelRunner, parts: Sequence[nn.Module], config: JobConfig
) -> BaseReference:
    """Returns the reference of a policy with adapters.

    Args:
        policy: Runs the policy.
        parts: Parts of the policy that this rank holds.
        config: Configuration of the run.
    """
    if not isinstance(policy, PipelineRunner):
        return BaseReference(policy, parts)
    # Stages of its own, which turn the adapters off also when they run in a gap of a training pass.
    runner = PipelineForwardRunner(policy.schedule.stages, config)
    for stage in runner.stages:
        stage.surrounding = partial(adapters_off, [stage.submod])
    return BaseReference(runner, parts)
