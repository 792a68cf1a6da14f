# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes process groups for what communicates beside the training step, and finds rank 0's address.

Each gets its own group, because two threads must not issue collectives on one communicator.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from torchtitan.grpo.system.network import source_address


def new_group(
    description: str, backend: str, timeout_seconds: float, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Returns a group of all or some ranks. All ranks, members or not, must make groups in the same order."""
    # A rank that is not a member gets a placeholder, which it never uses.
    return dist.new_group(  # pyright: ignore[reportReturnType]
        list(ranks) if ranks is not None else None,
        backend=backend,
        timeout=timedelta(seconds=timeout_seconds),
        group_desc=description,
    )


def leader_address() -> str:
    """Returns the address at which other ranks reach rank 0: loopback if all are on one host."""
    address = os.environ.get("MASTER_ADDR")  # not there without torchrun
    if address is None or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    return socket.gethostbyname(address)


def route_address(setting: str, server_url: str) -> str:
    """Resolves ``weight_sync.master_address``: "auto" is this host's address on the route to a server."""
    if setting != "auto":
        return setting
    url = urlsplit(server_url)
    return source_address(url.hostname or "127.0.0.1", url.port or 80)


def listening_store(
    address: str, world_size: int | None, timeout_seconds: float, port: int = 0
) -> dist.TCPStore:
    """Returns a store that listens on an address. Port 0 takes a free one. Raises OSError if that fails."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(target[:2], family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
