# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How many training ranks a run on one machine has."""

import math

from torchtitan.grpo.command_line.errors import ConfigError
from torchtitan.grpo.job_config import JobConfig


def choose_num_ranks(config: JobConfig, num_gpus: int, asked: int | None) -> int:
    """Returns the number of training ranks.

    The layout decides, if it fixes all degrees. A layout with ``data_parallel_shard_degree = -1``
    gets as many ranks as there are GPUs that no launched server needs, and on a machine without a
    GPU as few as it can have.

    Args:
        config: Configuration of the run.
        num_gpus: Number of visible GPUs.
        asked: Number that the user asked for; None if the user left it open.

    Raises:
        ConfigError: If there are not enough GPUs.
    """
    if asked is not None:
        if num_gpus and asked > num_gpus:
            raise ConfigError(
                f"--gpus (or --nproc) must be at most the number of visible GPUs, {num_gpus}, got {asked}."
            )
        return asked
    smallest, is_fixed = _ranks_of_layout(config)
    if num_gpus == 0:
        return smallest
    free = max(1, num_gpus - gpus_of_servers(config))
    if smallest > num_gpus:
        raise ConfigError(
            f"The layout in [parallelism] needs {smallest} ranks with a GPU each, and {num_gpus} GPUs "
            "are visible. Lower the degrees."
        )
    return smallest if is_fixed else max(smallest, free // smallest * smallest)


def _ranks_of_layout(config: JobConfig) -> tuple[int, bool]:
    """Returns the smallest number of ranks of the layout, and whether it is the only one."""
    settings = config.parallelism
    degrees = (
        settings.data_parallel_replicate_degree,
        settings.context_parallel_degree,
        settings.tensor_parallel_degree,
        settings.pipeline_parallel_degree,
    )
    shards = settings.data_parallel_shard_degree
    # Degrees below 1 are refused by the checks of the ranks, with their key.
    return math.prod(max(1, degree) for degree in (*degrees, shards)), shards != -1


def gpus_of_servers(config: JobConfig) -> int:
    """Returns the number of GPUs that launched servers are left: at least one for each server."""
    inference = config.inference
    uses_gpus = inference.launch and inference.device != "cpu" and config.has_servers
    return inference.num_servers * max(1, inference.tensor_parallel_size) if uses_gpus else 0
