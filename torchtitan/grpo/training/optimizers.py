# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the optimizers of ``[optimizer]``: upstream's, or Muon for matrices beside AdamW."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchtitan.grpo.config.job_config import Optimizer
from torchtitan.grpo.system.dtypes import TORCH_DTYPE_MAP
from torchtitan.grpo.training.muon import Muon
from torchtitan.grpo.upstream.parallelism import ParallelDims
from torchtitan.grpo.upstream.trainer import OptimizersContainer, build_adam

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build_optimizers(
    model_parts: list[nn.Module], config: Optimizer, dims: ParallelDims, ft_manager: Any = None
) -> OptimizersContainer:
    if config.name == "Muon":
        return MuonContainer(model_parts, config)
    return build_adam(model_parts, config, dims, ft_manager=ft_manager)


class MuonContainer(OptimizersContainer):
    """AdamW for each model part, and Muon if it has hidden matrices.

    AdamW comes first, so that its learning rate is logged. A checkpoint holds states by parameter
    names, and loads under any layout.
    """

    def __init__(self, model_parts: Sequence[nn.Module], config: Optimizer) -> None:
        self.model_parts = list(model_parts)
        self._of_part: list[tuple[torch.optim.Optimizer, ...]] = []
        for part in self.model_parts:
            matrices, others = split_parameters(part)
            built = [_adamw(others, config)] if others else []
            built += [_muon(matrices, config)] if matrices else []
            self._of_part.append(tuple(built))
        self.optimizers = [optimizer for some in self._of_part for optimizer in some]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._post_init([p for group in groups for p in group["params"]], {"lr": config.lr})

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            found |= get_optimizer_state_dict(part, optimizers, options=_FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            set_optimizer_state_dict(part, optimizers, state_dict, options=_FLAT)


def split_parameters(part: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns matrices inside of blocks, batches of experts included, and all other parameters.

    The others are norms, biases, embedding and output layer, whose rows belong to tokens.
    """
    matrices, others = [], []
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            is_matrix = name.startswith("layers.") and parameter.ndim >= 2
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _adamw(parameters: list[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
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
        momentum=config.muon_momentum,
        adjust_lr_fn=config.muon_adjust_lr,
        dtype=TORCH_DTYPE_MAP[config.muon_dtype],
    )
