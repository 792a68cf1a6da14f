# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo train X.toml [--gpus N] [--max-restarts N] [--table.key value ...]``."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan.grpo.config.cluster import server_groups
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig


def choose_num_ranks(config: JobConfig, num_gpus: int, asked: int | None) -> int:
    """Returns the number of training ranks. Raises ConfigError if there are too few GPUs.

    ``asked`` takes precedence, and then a layout that fixes all degrees. Otherwise there is one rank per
    GPU that no launched server needs or, without a GPU, as few ranks as the layout allows.
    """
    if asked is not None:
        if num_gpus and asked > num_gpus:
            raise ConfigError(
                f"--gpus (or --nproc) must be at most the number of visible GPUs, {num_gpus}, got {asked}."
            )
        return asked
    smallest, is_fixed = ranks_of_layout(config)
    if num_gpus == 0:
        return smallest
    free = max(1, num_gpus - gpus_of_servers(config))
    if smallest > num_gpus:
        raise ConfigError(
            f"The layout in [parallelism] needs {smallest} ranks with a GPU each, and {num_gpus} GPUs "
            "are visible. Lower the degrees."
        )
    return smallest if is_fixed else max(smallest, free // smallest * smallest)


def ranks_of_layout(config: JobConfig) -> tuple[int, bool]:
    """Returns the layout's smallest number of ranks, and whether no other number is possible."""
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
    """Returns the number of GPUs that launched servers use and do not share with training ranks."""
    inference = config.inference
    if inference.device == "cpu" or not config.has_servers:
        return 0
    groups = [group for group in server_groups(config) if not group.is_lent]
    size = max(1, inference.tensor_parallel_size)
    return sum(len(group.gpus) or group.num_servers * size for group in groups)


_COUNTS = ("--gpus", "--nproc", "--nproc_per_node", "--nproc-per-node")
_RESTARTS = ("--max-restarts", "--max_restarts")
SETTINGS_FLAG = "--settings"
_FLAGS = ("--dry-run", SETTINGS_FLAG)
"""Options without a value. The TOML file comes before the first other word."""


@dataclass
class TrainArguments:
    """The command line of ``train``. ``rest`` is for the ranks. ``counted`` is the option of ``num_ranks``."""

    rest: list[str]
    num_ranks: int | None = None
    counted: str = ""
    max_restarts: int = 0


def parse(arguments: list[str]) -> TrainArguments:
    parsed = TrainArguments([])
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-") and all(flag in _FLAGS for flag in parsed.rest):
            parsed.rest += ["--job.config_file", word]
            continue
        option, equals, value = word.partition("=")
        if option not in (*_COUNTS, *_RESTARTS):
            parsed.rest.append(word)
            continue
        value = value if equals else (words.pop(0) if words else "")
        if option in _RESTARTS:
            if not value.isdecimal():
                raise ConfigError(
                    f"{option} must be a number of restarts, at least 0, got {value!r}."
                )
            parsed.max_restarts = int(value)
            continue
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{option} must be a number of ranks, at least 1, got {value!r}.")
        parsed.num_ranks, parsed.counted = int(value), option
    return parsed


def read_settings(parsed: TrainArguments) -> JobConfig:
    """Returns the configuration without further checks. Raises ConfigError for a wrong key or value."""
    is_dry = "--dry-run" in parsed.rest
    flags = _FLAGS if is_dry else ()
    return read_config([word for word in parsed.rest if word not in flags])


def plan(parsed: TrainArguments) -> tuple[JobConfig, int, int]:
    """Returns the configuration, the number of ranks, and the number of visible GPUs. Raises ConfigError."""
    config = read_settings(parsed)
    if config.job.config_file is None and not parsed.rest:
        raise ConfigError("A configuration must be named: torchtitan-grpo train X.toml.")

    # Imported here, because torch takes seconds, and the mistakes above should be shown at once.
    import torch

    from torchtitan.grpo.config_checks.servers import check_inference

    check_inference(config)
    num_gpus = torch.cuda.device_count()
    if parsed.counted == "--gpus" and num_gpus == 0:
        raise ConfigError(
            "--gpus needs a GPU, and none is visible. On CPU, --nproc N sets the ranks."
        )
    return config, choose_num_ranks(config, num_gpus, parsed.num_ranks), num_gpus


@contextmanager
def as_trained(arguments: list[str]) -> Iterator[list[str]]:
    """Yields the ranks' part of a command line of ``train``.

    Within the block, ``WORLD_SIZE`` is the number of ranks, unless it was set before."""
    parsed = parse(arguments)
    _, num_ranks, _ = plan(parsed)
    is_set = "WORLD_SIZE" in os.environ
    os.environ.setdefault("WORLD_SIZE", str(num_ranks))
    try:
        yield parsed.rest
    finally:
        if not is_set:
            del os.environ["WORLD_SIZE"]


def train(arguments: list[str]) -> int:
    """Runs the training ranks on this machine, and returns the run's exit status. Raises ConfigError."""
    parsed = parse(arguments)
    config, num_ranks, num_gpus = plan(parsed)
    if "--dry-run" not in parsed.rest:
        print(_opening(config, num_ranks, num_gpus), file=sys.stderr, flush=True)

    from torchtitan.grpo.start.torchrun import run_ranks

    return run_ranks(parsed.rest, num_ranks, config.grpo.stop_timeout_seconds, parsed.max_restarts)


def _opening(config: JobConfig, num_ranks: int, num_gpus: int) -> str:
    ranks = "1 training rank" if num_ranks == 1 else f"{num_ranks} training ranks"
    if num_gpus == 0:
        return f"Starting {ranks} on the CPU."
    servers = gpus_of_servers(config)
    left = max(0, num_gpus - num_ranks)
    for_servers = f", {left} for servers" if servers and left else ""
    return f"Starting {ranks} on {num_ranks} of {num_gpus} GPUs{for_servers}."
