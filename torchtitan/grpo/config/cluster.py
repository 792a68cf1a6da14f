# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[cluster.NAME]``, and the servers that a run launches with or without such tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from torchtitan.grpo.config.bounds import at_least
from torchtitan.grpo.config.inference import Inference


@dataclass
class ClusterRow:
    """``[cluster.NAME]``: servers that the run launches, and the GPUs that they use.

    Each table describes a part of rank 0's machine, and together they replace
    ``inference.num_servers`` and ``inference.lend``. They need ``inference.launch``: servers that are
    named or register themselves cannot be lent, because nothing could end one that does not fall
    asleep. docs/servers.md has an example.
    """

    tags: list[str] = field(default_factory=list)
    """``rollout``: the run launches servers on the GPUs. ``train``: training ranks use them too, and
    the servers sleep while the ranks train, as with ``inference.lend``. Required, with ``rollout``:
    ranks need no table."""

    num_servers: Annotated[int, at_least(1)] = 1
    """Number of servers that are launched."""

    gpus: list[int] = field(default_factory=list)
    """GPUs, counted from 0 among those that ``CUDA_VISIBLE_DEVICES`` shows. The ranks of the machine
    use the first ones. Empty means all GPUs with a rank or, without the tag ``train``, all GPUs
    without one."""


@dataclass(frozen=True)
class ServerGroup:
    """Servers that are launched on the same hardware.

    Without ``gpus``, they use the training GPUs if ``is_lent``, else the other GPUs. ``key`` is the TOML
    table that sets their number.
    """

    key: str
    num_servers: int
    is_lent: bool
    gpus: tuple[int, ...] = ()


class HasServers(Protocol):
    """The configuration of a run, or the part of it that the rollout process gets."""

    inference: Inference
    cluster: dict[str, ClusterRow]


def server_groups(config: HasServers) -> list[ServerGroup]:
    """Returns the groups of servers that a run launches; without ``[cluster]`` there is only one group."""
    inference = config.inference
    if not inference.launch:
        return []
    if not config.cluster:
        return [ServerGroup("inference", inference.num_servers, inference.lend)]
    return [
        ServerGroup(f"cluster.{name}", row.num_servers, "train" in row.tags, tuple(row.gpus))
        for name, row in config.cluster.items()
    ]


def lent_groups(config: HasServers) -> list[ServerGroup]:
    """Returns the groups of servers that run on the training devices while training waits, else sleep."""
    return [group for group in server_groups(config) if group.is_lent]


def count_servers(groups: Sequence[ServerGroup]) -> int:
    return sum(group.num_servers for group in groups)
