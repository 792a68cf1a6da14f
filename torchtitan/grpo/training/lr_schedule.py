# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The learning-rate schedule of ``[lr_scheduler]``: warm-up, constant, decay."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.grpo.config.frame import LRScheduler
from torchtitan.grpo.training.optimizers import Optimizers

Factor = Callable[[int], float]
"""Maps steps taken to the factor of ``optimizer.lr`` in the next step."""

Groups = list[list[dict[str, Any]]]


class Schedules(Stateful):
    """One schedule per optimizer. All are alike, so a checkpoint keeps only the state of the first."""

    def __init__(self, optimizers: Optimizers, factor: Factor) -> None:
        self.schedulers = [LambdaLR(optimizer, factor) for optimizer in optimizers]

    def __iter__(self) -> Iterator[LambdaLR]:
        return iter(self.schedulers)

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(copy.deepcopy(state_dict))


def settings_of(optimizers: Optimizers) -> Groups:
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def renew_settings(
    optimizers: Optimizers, schedulers: Schedules, settings: Groups
) -> tuple[float, float]:
    """Restores the optimizer settings from :func:`settings_of`, which loading a checkpoint has replaced.

    Only moments and steps should come from a checkpoint. Returns the learning rate of the next
    step, and the one that was in the checkpoint.
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


def build_lr_schedulers(
    optimizers: Optimizers,
    config: LRScheduler,
    training_steps: int,
    *,
    num_steps: int | None = None,
) -> Schedules:
    """Returns schedules over ``num_steps``: by default ``total_steps`` if set, or else ``training_steps``."""
    total = config.total_steps if config.total_steps is not None else training_steps
    return Schedules(optimizers, schedule_of(config, total if num_steps is None else num_steps))


def lengths_of(config: LRScheduler, num_steps: int) -> tuple[int, int]:
    """Returns over how many steps the learning rate rises, and over how many it falls."""
    warmup = min(config.warmup_steps, num_steps)
    return warmup, min(_asked_decay(config, num_steps), num_steps - warmup)


def describe_shortened(config: LRScheduler, num_steps: int) -> str | None:
    """Describes lengths that ``num_steps`` shortens, if any. ``decay_ratio = 1`` means what warm-up leaves."""
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


def factors_of(scheduler: Any) -> list[Factor]:
    return scheduler.lr_lambdas


def schedule_of(config: LRScheduler, num_steps: int) -> Factor:
    """Returns the learning-rate factor over steps. Decay gets at most the steps that warm-up leaves.

    After the last step, the rate stays constant."""
    warmup, decay = lengths_of(config, num_steps)
    return partial(
        _factor,
        warmup=warmup,
        decay_begins=num_steps + 1 - decay,
        decay=decay,
        shape=config.decay_type,
        least=config.min_lr_factor,
        last=num_steps - 1,
    )


def _factor(
    num_taken: int,
    *,
    warmup: int,
    decay_begins: int,
    decay: int,
    shape: str,
    least: float,
    last: int,
) -> float:
    # The first step has a rate above 0, and so has the last one of a decay to 0: it is as if one
    # more step followed.
    step = min(num_taken, last)
    if step < warmup:
        return (step + 1) / warmup
    if step < decay_begins:
        return 1.0
    progress = (step + 1 - decay_begins) / decay
    falls = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return least + (1 - least) * falls[shape]
