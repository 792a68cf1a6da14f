# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The reference model of the KL penalty: a frozen second model, laid out like the policy."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.training.runner import ForwardRunner


class Reference(ForwardRunner):
    """Runs the reference forward.

    Args:
        runner: Over the reference's parts.
        parts: Whose weights are the reference's.
        device: Where forwards run.
        ema: ``grpo.ref_model_ema``.
        offload: ``grpo.ref_model_offload``: between uses the shards lie in host memory.
    """

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
        self._move(self.home)

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        self._move(self.device)
        output = self.runner.forward(rows)
        self._move(self.home)
        return output

    @torch.no_grad()
    def follow(self, policy_parts: Sequence[nn.Module]) -> None:
        """Moves the weights towards the policy's: an exponential moving average.

        Both have the same layout, so each rank does its own shards.
        """
        if self.ema == 0:
            return
        self._move(self.device)
        policy = dict(named_parameters(list(policy_parts)))
        for name, mine in named_parameters(self.parts):
            local_tensor(mine).lerp_(local_tensor(policy[name]).to(mine.dtype), 1 - self.ema)
        self._move(self.home)

    def checkpoint_state(self) -> dict[str, Stateful]:
        """What a checkpoint must hold for a resumed run to have the same reference."""
        return {"reference": PartsState(self.parts)} if self.ema > 0 else {}

    def _move(self, device: torch.device) -> None:
        for part in self.parts:
            if next(part.parameters()).device.type != device.type:
                part.to(device)


class PartsState(Stateful):
    """Weights of model parts in a checkpoint, taken from the parts whenever they are asked for.

    Upstream's ``ModelWrapper`` keeps the tensors that it found when it was made. A model that
    moves between devices has others by the time it is saved.

    Args:
        parts: Of one model; no two share a name.
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
