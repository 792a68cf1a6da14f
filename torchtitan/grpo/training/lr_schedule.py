# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the learning-rate schedule of ``[lr_scheduler]`` with upstream's function."""

from dataclasses import replace

from torchtitan.components.lr_scheduler import (
    LRSchedulersContainer,
)
from torchtitan.components.lr_scheduler import (
    build_lr_schedulers as build_upstream,
)
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import LRScheduler


def build_lr_schedulers(
    optimizers: OptimizersContainer, config: LRScheduler, training_steps: int
) -> LRSchedulersContainer:
    """Builds the schedules of the optimizers.

    The warm-up takes precedence, and the decay takes of ``decay_ratio`` what the warm-up leaves.
    Upstream does the same, but warns, although ``decay_ratio = 1`` with a warm-up means just that.

    Args:
        optimizers: Optimizers of all model parts.
        config: ``[lr_scheduler]``.
        training_steps: ``training.steps``.
    """
    total = config.total_steps if config.total_steps is not None else training_steps
    warmup = min(config.warmup_steps, total)
    ratio = 1.0 if config.decay_ratio is None else config.decay_ratio
    decay = min(round(total * ratio), total - warmup)
    fitting = replace(config, warmup_steps=warmup, decay_ratio=decay / total)
    return build_upstream(optimizers, fitting, training_steps)
