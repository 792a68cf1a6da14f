# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The reference model of the KL penalty, a second model that is laid out like the policy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.models.lora import adapters_off
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.training.runner import ForwardRunner, ModelRunner, WholeModelRunner


class BaseReference(ForwardRunner):
    """Uses the policy without its LoRA adapters as the reference, which needs no weights of its own."""

    def __init__(self, runner: ForwardRunner, parts: Sequence[nn.Module]) -> None:
        self._runner, self._parts = runner, list(parts)
        self.has_output, self.stages = runner.has_output, runner.stages

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        with adapters_off(self._parts):
            return self._runner.forward(rows)

    def to_all(self, output: torch.Tensor | None, rows: TrainRows) -> torch.Tensor:
        return self._runner.to_all(output, rows)

    def follow(self, policy_parts: Sequence[nn.Module]) -> None:
        pass

    def checkpoint_state(self) -> dict[str, Stateful]:
        return {}


def base_reference(
    policy: ModelRunner, parts: Sequence[nn.Module], config: JobConfig
) -> BaseReference:
    if isinstance(policy, WholeModelRunner):
        return BaseReference(policy, parts)
    from torchtitan.grpo.training.stage_runner import PipelineForwardRunner, PipelineRunner

    assert isinstance(policy, PipelineRunner)
    # Separate stages, which turn the adapters off also when they run in a gap of a training pass.
    runner = PipelineForwardRunner(policy.schedule.stages, config)
    for stage in runner.stages:
        stage.surrounding = partial(adapters_off, [stage.submod])
    return BaseReference(runner, parts)


class Reference(ForwardRunner):
    """A reference with weights of its own; ``offload`` keeps them in host memory between uses."""

    def __init__(
        self,
        runner: ForwardRunner,
        parts: list[nn.Module],
        device: torch.device,
        *,
        ema: float,
        offload: bool,
    ) -> None:
        self.runner, self.parts, self.device, self.ema = runner, parts, device, ema
        self.has_output = runner.has_output
        self.home = torch.device("cpu") if offload else device
        self.stages = () if offload else runner.stages
        self._move(self.home)

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        self._move(self.device)
        output = self.runner.forward(rows)
        self._move(self.home)
        return output

    def to_all(self, output: torch.Tensor | None, rows: TrainRows) -> torch.Tensor:
        return self.runner.to_all(output, rows)

    @torch.no_grad()
    def follow(self, policy_parts: Sequence[nn.Module]) -> None:
        """Moves this rank's shards towards the policy's; ``ema`` is the weight of the old values."""
        if self.ema == 0:
            return
        self._move(self.device)
        policy = dict(named_parameters(list(policy_parts)))
        for name, mine in named_parameters(self.parts):
            local_tensor(mine).lerp_(local_tensor(policy[name]).to(mine.dtype), 1 - self.ema)
        self._move(self.home)

    def checkpoint_state(self) -> dict[str, Stateful]:
        """Returns the state of a moving reference; empty if it does not move."""
        return {"reference": PartsState(self.parts)} if self.ema > 0 else {}

    def _move(self, device: torch.device) -> None:
        for part in self.parts:
            if next(part.parameters()).device.type != device.type:
                part.to(device)


class PartsState(Stateful):
    """Checkpoint state of model parts, read anew from the parts at each use.

    Upstream's ``ModelWrapper`` keeps the first tensors, which a model no longer uses after a change of device.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {
            name: tensor
            for part in self.parts
            for name, tensor in get_model_state_dict(part).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            own = {name: state_dict[name] for name in get_model_state_dict(part)}
            set_model_state_dict(part, own)
