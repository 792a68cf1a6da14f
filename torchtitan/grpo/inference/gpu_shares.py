# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides the GPUs of a machine, and the memory of shared ones, among launched servers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.config.cluster import ServerGroup

_BESIDE_TRAINING = 0.4
"""Part of a GPU's memory for servers if training uses the same GPU. Weights, gradients and optimizer
state of training need several times what a server's weights do."""
WITHOUT_TRAINING = 0.9
"""Part of a GPU's memory for servers that have the GPU for themselves, as vLLM's own default."""
ASLEEP_BYTES = 2 * 1024**3
"""Memory of a GPU that a sleeping server is assumed to keep. vLLM and SGLang free weights and cache,
but neither the CUDA context with its libraries (vLLM logs about 1.3 GiB outside of torch) nor CUDA
graphs (0.5 GiB and more)."""


@dataclass(frozen=True)
class GpuShare:
    """A server's GPUs (as in ``CUDA_VISIBLE_DEVICES``), and the part of their memory; None is no limit."""

    gpus: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    memory: float | None = None


def share_gpus(
    groups: Sequence[ServerGroup],
    gpus: Sequence[str],
    num_training: int,
    *,
    tensor_parallel_size: int,
    memory: float,
    num_heads: int | None,
    lent_part: float = 0.0,
) -> list[GpuShare]:
    """Returns the share of each server, group by group. Training uses the first ``num_training`` GPUs.

    ``tensor_parallel_size`` and ``memory`` are settings of ``[inference]``, and may be 0. A size of 0 means
    the largest number of a server's GPUs that divides ``num_heads``, the number of attention heads. With a
    ``memory`` of 0, servers share a GPU's memory evenly. If training lends a GPU to servers, they may
    together take the part ``lent_part`` of its memory.
    """
    of_servers = [group for group in groups for _ in range(group.num_servers)]
    if not gpus:
        return [GpuShare((), max(1, tensor_parallel_size), memory or None)] * len(of_servers)
    shares: list[tuple[int, ...]] = []
    places = server_places(groups, len(gpus), num_training)
    for group, own in zip(of_servers, places, strict=True):
        if tensor_parallel_size > len(own):
            raise ValueError(
                "inference.tensor_parallel_size must be at most the number of GPUs of each server, "
                f"which is {len(own)} with {len(gpus)} GPUs for {group.key}.num_servers = "
                f"{group.num_servers}, got {tensor_parallel_size}. Lower it, or lower "
                f"{group.key}.num_servers or the number of training ranks."
            )
        sizes = [size for size in range(1, len(own) + 1) if (num_heads or 1) % size == 0]
        shares.append(own[: tensor_parallel_size or max(sizes)])
    users = Counter(gpu for own in shares for gpu in own)
    found = []
    for group, own in zip(of_servers, shares, strict=True):
        num_users, beside_training = max(users[gpu] for gpu in own), min(own) < num_training
        part = _BESIDE_TRAINING if beside_training else WITHOUT_TRAINING
        part = lent_part if group.is_lent else part
        is_alone = num_users == 1 and not beside_training
        names = tuple(gpus[gpu] for gpu in own)
        found.append(GpuShare(names, len(own), memory or (None if is_alone else part / num_users)))
    return found


def server_places(
    groups: Sequence[ServerGroup], num_gpus: int, num_training: int
) -> list[tuple[int, ...]]:
    """Returns the GPUs of each server, group by group. Training uses the first ``num_training`` GPUs.

    Servers with ``is_lent`` get training's GPUs, which they use while training waits. Other servers get
    the remaining GPUs, or all of them if none remain.
    """
    others = range(num_training, num_gpus) or range(num_gpus)
    found = []
    for group in groups:
        gpus = group.gpus or (range(num_training) if group.is_lent else others)
        found += [gpus_of(index, group.num_servers, gpus) for index in range(group.num_servers)]
    return found


def most_on_a_gpu(places: Sequence[tuple[int, ...]]) -> int:
    return max(Counter(gpu for own in places for gpu in own).values())


def part_beside_training(num_servers: int, num_gpus: int, memory: float) -> float:
    """Returns the part of the GPUs' memory that launched servers may take beside training."""
    return memory * servers_per_gpu(num_servers, num_gpus) if memory else _BESIDE_TRAINING


def servers_per_gpu(num_servers: int, num_gpus: int) -> int:
    return -(-num_servers // num_gpus)


def gpus_of(index: int, num_servers: int, gpus: Sequence[int]) -> tuple[int, ...]:
    """Returns one server's GPUs: an equal part of them, or one shared GPU if there are fewer than servers."""
    share = len(gpus) // num_servers
    if share == 0:
        return (gpus[index % len(gpus)],)
    return tuple(gpus[index * share : (index + 1) * share])
