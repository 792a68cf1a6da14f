# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The costs of a pipeline's passes before anything has been measured."""

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.tables.costs import Costs

_TIMES = {"none": (1.0, 1.0, 1.0), "full": (1.0, 2.0, 0.8), "selective": (1.0, 1.5, 0.8)}
"""Relative times of F, I and W, by ``activation_checkpoint.mode``.

I includes the recomputation of checkpointed blocks. W is slightly shorter, because norms and attention
do not take part in it.
"""


def assumed_times(config: JobConfig) -> tuple[float, float, float]:
    """Returns times of F, I and W that are typical of the configured activation checkpointing."""
    return _TIMES.get(config.activation_checkpoint.mode, _TIMES["selective"])


def assumed_costs(config: JobConfig, stages_per_rank: int) -> Costs:
    """Returns the costs of equal stages with these times."""
    degree = config.parallelism.pipeline_parallel_degree
    return Costs.uniform(degree, stages_per_rank, assumed_times(config))
