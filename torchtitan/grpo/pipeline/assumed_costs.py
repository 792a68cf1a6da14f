# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The costs of a pipeline's passes before anything has been measured."""

from torchtitan.config import JobConfig

from torchtitan.grpo.pipeline.tables.costs import Costs

_TIMES = {"none": (1.0, 1.0, 1.0), "full": (1.0, 2.0, 0.8), "selective": (1.0, 1.5, 0.8)}
"""Times of F, I and W relative to each other, by ``activation_checkpoint.mode``. I computes what a
checkpoint left out again. W is a bit shorter, because norms and attention have no part in it."""


def assumed_costs(config: JobConfig, stages_per_rank: int) -> Costs:
    """Returns costs of equal stages, as they are typical for the activation checkpoints in use."""
    times = _TIMES.get(config.activation_checkpoint.mode, _TIMES["selective"])
    return Costs.uniform(config.parallelism.pipeline_parallel_degree, stages_per_rank, times)
