# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides the GPUs of a machine, and the memory of shared ones, among launched servers."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """A server's GPUs (as in ``CUDA_VISIBLE_DEVICES``), workers, and part of memory, if limited."""

    gpus: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    memory: float | None = None


def share_gpus(
    num_servers: int,
    gpus: Sequence[str],
    *,
    beside_training: bool,
    tensor_parallel_size: int,
    memory: float,
    num_heads: int | None,
    lent_part: float = 0.0,
) -> list[GpuShare]:
    """``tensor_parallel_size`` and ``memory`` are settings of ``[inference]``.

    0 takes as many of a server's GPUs as divide the attention heads, and divides shared GPUs
    evenly. ``num_heads`` is ``None`` if a server takes one GPU. ``lent_part`` is the part of the
    memory that servers may take if GPUs are lent to them, otherwise 0.
    """
    if not gpus:
        return [GpuShare((), max(1, tensor_parallel_size), memory or None)] * num_servers
    shares = []
    for index in range(num_servers):
        own = gpus_of(index, num_servers, gpus)
        if tensor_parallel_size > len(own):
            raise ValueError(
                "inference.tensor_parallel_size must be at most the number of GPUs of each server, "
                f"which is {len(own)} with {len(gpus)} GPUs for inference.num_servers = "
                f"{num_servers}, got {tensor_parallel_size}. Lower it, or lower inference.num_servers "
                "or the number of training ranks."
            )
        shares.append(own[: tensor_parallel_size or _largest_divisor(num_heads or 1, len(own))])
    users = [gpu for own in shares for gpu in own]
    part = lent_part or (_BESIDE_TRAINING if beside_training else WITHOUT_TRAINING)
    found = []
    for own in shares:
        num_users = max(users.count(gpu) for gpu in own)
        is_alone = num_users == 1 and not beside_training
        found.append(GpuShare(own, len(own), memory or (None if is_alone else part / num_users)))
    return found


def part_beside_training(num_servers: int, num_gpus: int, memory: float) -> float:
    """Returns the part of the GPUs' memory that launched servers may take beside training."""
    return memory * servers_per_gpu(num_servers, num_gpus) if memory else _BESIDE_TRAINING


def servers_per_gpu(num_servers: int, num_gpus: int) -> int:
    return -(-num_servers // num_gpus)


def gpus_of(index: int, num_servers: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """Returns the GPUs of a server: an even part, or one that it shares with other servers."""
    share = len(gpus) // num_servers
    if share == 0:
        return (gpus[index % len(gpus)],)
    return tuple(gpus[index * share : (index + 1) * share])


def _largest_divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, limit + 1) if number % size == 0)
