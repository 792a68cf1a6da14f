# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Process groups between the trainer and one server, beside the default process group.

The trainer has rank 0, and the server's workers have the ranks after it. The trainer, the embedded
server and vLLM's workers call these functions, so this module needs torch alone. SGLang has its
own implementation; the rendezvous here is compatible with it, so that the trainer treats all kinds
of servers alike.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def create_weight_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_seconds: float,
    *,
    store: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Joins a weight group; returns when all ``world_size`` members have joined.

    Args:
        master_address: Host of the trainer's store.
        master_port: Port of the trainer's store.
        rank: 0 on the trainer, ``rank_offset + worker`` on a server.
        world_size: 1 plus the number of the server's workers.
        group_name: Prefix of the keys in the store. Each name may be used only once.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: Maximum duration of the rendezvous, and of each later collective.
        store: The store on which the trainer listens; ``None`` connects to it, as servers do.

    Raises:
        torch.distributed.DistStoreError: If not all members joined in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        store = dist.TCPStore(
            master_address, master_port, world_size, is_master=False, timeout=timeout
        )
    assert store is not None
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,  # pyright: ignore[reportArgumentType]  (a str by another name)
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def destroy_weight_group(group: dist.ProcessGroup) -> None:
    """Leaves the group. An NCCL communicator is aborted without waiting for its operations."""
    if group in c10d._world.pg_map:
        if dist.get_backend(group) == dist.Backend.NCCL:
            group.abort()
        dist.destroy_process_group(group)
