# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps the optimizer's settings of a resumed run from being replaced by its checkpoint's."""

from typing import Any

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan.grpo.training.lr_schedule import factors_of

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
    """Puts the settings of this run back over those that a checkpoint brought.

    Loading a checkpoint replaces the learning rate, the betas, epsilon, and the weight decay of
    each group, and the schedulers' base rates. What it must bring are the moments, and how many
    steps the schedulers have taken.

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
