# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Process groups beside torchtitan's own, and where ranks meet without one.

Two threads must not issue collectives on one communicator, so whatever talks beside the
training has groups of its own: the feed, the publisher's commands, the gathering of shards.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def new_group(
    description: str,
    backend: str,
    timeout_seconds: float,
    ranks: Sequence[int] | None = None,
) -> dist.ProcessGroup:
    """A further group; every rank of the run calls it, members or not, in one order.

    Args:
        description: Shown in torch's messages.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: Bound of one collective.
        ranks: Its members; None is all.
    """
    # A rank that is no member gets a placeholder, which it never uses.
    return dist.new_group(  # pyright: ignore[reportReturnType]
        list(ranks) if ranks is not None else None,
        backend=backend,
        timeout=timedelta(seconds=timeout_seconds),
        group_desc=description,
    )


def leader_address() -> str:
    """Where the other ranks reach this one, rank 0: loopback where there is but one host."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    return socket.gethostbyname(os.environ["MASTER_ADDR"])
