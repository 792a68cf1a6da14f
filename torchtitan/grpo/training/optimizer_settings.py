# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps a resumed run's optimizer settings when its checkpoint is loaded."""

from typing import Any

from torchtitan.grpo.training.lr_schedule import factors_of
from torchtitan.grpo.upstream.trainer import LRSchedulersContainer, OptimizersContainer

Groups = list[list[dict[str, Any]]]
"""For each optimizer, the settings of each of its groups of parameters."""


def settings_of(optimizers: OptimizersContainer) -> Groups:
    """Returns the settings of an optimizer's groups: what ``[optimizer]`` asks for."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def renew_settings(
    optimizers: OptimizersContainer, schedulers: LRSchedulersContainer, settings: Groups
) -> tuple[float, float]:
    """Restores the settings of this run after a checkpoint has replaced them.

    Loading a checkpoint replaces the learning rate, the betas, epsilon, and the weight decay of
    each group, and the schedulers' base rates. Only the moments and the numbers of steps that the
    schedulers have taken should come from the checkpoint.

    Args:
        optimizers: The optimizers, after loading.
        schedulers: Their schedulers, after loading.
        settings: What :func:`settings_of` returned before loading.

    Returns:
        The learning rate of the next step, and the one that the checkpoint brought for it.
    """
    brought = float(optimizers.optimizers[0].param_groups[0]["lr"])
    for optimizer, scheduler, groups in zip(
        optimizers, schedulers.schedulers, settings, strict=True
    ):
        base_rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        scheduler.base_lrs = list(base_rates)
        rates = [
            rate * factor(scheduler.last_epoch)
            for rate, factor in zip(base_rates, factors_of(scheduler), strict=True)
        ]
        for group, wanted, rate in zip(optimizer.param_groups, groups, rates, strict=True):
            group.update(wanted | {"lr": rate})
        scheduler._last_lr = list(rates)
    return float(schedulers.schedulers[0].get_last_lr()[0]), brought
