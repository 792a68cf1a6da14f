# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the optimizers of ``[optimizer]``: AdamW, Adam, or Muon for matrices beside AdamW."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.config.frame import Optimizer
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.training.muon import Muon

_MUON_MOMENTUM = 0.95  # torch's default, and that of the Muon post
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers(Stateful):
    """Makes the optimizers of all of a rank's model parts act as one.

    A checkpoint holds their states by parameter name, and can be loaded under any layout.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], of_part: Sequence[tuple[torch.optim.Optimizer, ...]]
    ) -> None:
        self.model_parts, self._of_part = list(model_parts), list(of_part)
        self.optimizers = [optimizer for some in of_part for optimizer in some]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            found |= get_optimizer_state_dict(part, optimizers, options=_FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            set_optimizer_state_dict(part, optimizers, state_dict, options=_FLAT)


def build_optimizers(model_parts: Sequence[nn.Module], config: Optimizer) -> Optimizers:
    """Builds the optimizers of all parts; AdamW comes before Muon, so that AdamW's learning rate is logged."""
    of_part = []
    for part in model_parts:
        if config.name == "Muon":
            matrices, others = split_parameters(part)
        else:
            matrices, others = [], [p for p in part.parameters() if p.requires_grad]
        built: list[torch.optim.Optimizer] = [_adam(others, config)] if others else []
        built += [_muon(matrices, config)] if matrices else []
        of_part.append(tuple(built))
    return Optimizers(model_parts, of_part)


def split_parameters(part: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the matrices of blocks, stacked experts included, and all other parameters.

    The others are norms and biases, and the embedding and output layer, whose rows belong to tokens.
    """
    matrices, others = [], []
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            is_matrix = name.startswith("layers.") and parameter.ndim >= 2
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _adam(parameters: list[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
    return kind(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def _muon(parameters: list[nn.Parameter], config: Optimizer) -> Muon:
    return Muon(
        parameters,
        lr=config.muon_lr or config.lr,
        weight_decay=config.weight_decay,
        momentum=_MUON_MOMENTUM,
        adjust_lr_fn=config.muon_adjust_lr,
        dtype=TORCH_DTYPE_MAP[config.muon_dtype],
    )
