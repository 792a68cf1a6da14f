# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the learning-rate schedule of ``[lr_scheduler]`` with upstream's function."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchtitan.grpo.upstream.configuration import LRScheduler
from torchtitan.grpo.upstream.trainer import LRSchedulersContainer, OptimizersContainer
from torchtitan.grpo.upstream.trainer import build_lr_schedulers as build_upstream

Groups = list[list[dict[str, Any]]]


def settings_of(optimizers: OptimizersContainer) -> Groups:
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def renew_settings(
    optimizers: OptimizersContainer, schedulers: LRSchedulersContainer, settings: Groups
) -> tuple[float, float]:
    """Restores the settings from :func:`settings_of`, which a checkpoint has replaced.

    Only moments and steps should come from a checkpoint. Returns the learning rate of the next
    step, and the checkpoint's.
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


Factor = Callable[[int], float]
"""Maps steps taken to the factor of ``optimizer.lr`` in the next step."""


def build_lr_schedulers(
    optimizers: OptimizersContainer,
    config: LRScheduler,
    training_steps: int,
    *,
    num_steps: int | None = None,
) -> LRSchedulersContainer:
    """Builds schedules in which the warm-up takes precedence, and the decay gets what it leaves.

    Afterwards the last rate stays, where upstream's falls to 0 and then below. ``num_steps=None``
    lays the schedule over ``lr_scheduler.total_steps`` or, if it is not set, ``training_steps``.
    """
    total = config.total_steps if config.total_steps is not None else training_steps
    total = total if num_steps is None else num_steps
    warmup, decay = lengths_of(config, total)
    fitting = replace(config, warmup_steps=warmup, decay_ratio=decay / total, total_steps=total)
    container = build_upstream(optimizers, fitting, training_steps)
    for scheduler in container.schedulers:
        held = [partial(_held, factor=f, last=total - 1) for f in factors_of(scheduler)]
        scheduler.lr_lambdas = held  # pyright: ignore[reportAttributeAccessIssue]
    return container


def lengths_of(config: LRScheduler, num_steps: int) -> tuple[int, int]:
    """Returns the steps over which the rate rises, and over which it falls."""
    warmup = min(config.warmup_steps, num_steps)
    return warmup, min(_asked_decay(config, num_steps), num_steps - warmup)


def describe_shortened(config: LRScheduler, num_steps: int) -> str | None:
    """Describes lengths that do not fit; ``decay_ratio = 1``, all that is left, always fits."""
    warmup, decay = lengths_of(config, num_steps)
    used = []
    if warmup < config.warmup_steps:
        used.append(f"it rises over {warmup} (lr_scheduler.warmup_steps is {config.warmup_steps})")
    if decay < (asked := _asked_decay(config, num_steps)) < num_steps:
        ratio = f"lr_scheduler.decay_ratio, {config.decay_ratio:g}, would be {asked}"
        used.append(f"it falls over {decay} ({ratio})")
    if not used:
        return None
    return f"The schedule of the learning rate has {num_steps} steps, so {' and '.join(used)}."


def _asked_decay(config: LRScheduler, num_steps: int) -> int:
    return round(num_steps * (1.0 if config.decay_ratio is None else config.decay_ratio))


def _held(num_taken: int, factor: Factor, last: int) -> float:
    return factor(min(num_taken, last))


def factors_of(scheduler: Any) -> list[Factor]:
    return scheduler.lr_lambdas


def schedule_of(config: LRScheduler, num_steps: int) -> Factor:
    nothing: Any = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    container = build_lr_schedulers(nothing, config, num_steps, num_steps=num_steps)
    return factors_of(container.schedulers[0])[0]
