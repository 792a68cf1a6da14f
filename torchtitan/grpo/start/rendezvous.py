# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rendezvous for torchrun's agents whose stores listen on one address only.

Torchrun's own ``c10d`` rendezvous listens on every interface, and its agents unpickle what they find
in the store: whoever reaches the port runs code as the user. This one is torch's rendezvous on other
stores:

- **Without an endpoint**, for one host: the agents' state stays in the memory of the only agent, and no
  socket exists for it. The store of the training ranks listens on loopback.
- **With an endpoint** ``address:port``, for several hosts: the agent whose host has that address listens
  on it and on no other interface. The store of the training ranks listens on the address that the host
  of rank 0 has on the route to the endpoint, or on ``--local-addr``. The agents still unpickle what is in
  the store, so the network between the hosts must be one that only trusted machines reach.

    torchrun --rdzv-backend torchtitan_grpo --nproc_per_node=2 -m torchtitan.grpo_train ...
    torchrun --rdzv-backend torchtitan_grpo --rdzv-endpoint 10.0.0.1:29400 --nnodes 2 ...

Torchrun finds it by the entry point ``torchrun.handlers`` of this package.
"""

import contextlib
import errno
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan.grpo.system.groups import listening_store, route_to

BACKEND = "torchtitan_grpo"
LOOPBACK = "127.0.0.1"

_DEFAULT_PORT = 29400
_READ_TIMEOUT_SECONDS = 60
_RANKS_STORE_TIMEOUT_SECONDS = 300


def register() -> None:
    """Makes the rendezvous known under the name :data:`BACKEND`."""
    # Where this package is installed, torch has registered its entry point under the name already.
    with contextlib.suppress(ValueError):
        rendezvous_handler_registry.register(BACKEND, make_handler)


def make_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Returns the rendezvous of one agent.

    Args:
        params: Torchrun's settings. ``endpoint`` is empty for one host, else the address and the port
            of the agents' store. ``local_addr`` is the address of this host, by default the one on the
            route to the endpoint.

    Raises:
        ValueError: If there are several hosts and no endpoint.
        RendezvousConnectionError: If the store cannot be reached.
    """
    if not params.endpoint:
        if params.max_nodes > 1:
            raise ValueError(
                "--rdzv-endpoint must name the address and the port of the first host for "
                f"--nnodes {params.min_nodes}:{params.max_nodes}, got nothing. Use an address of the "
                "network that connects the hosts, such as 10.0.0.1:29400."
            )
        return _listening_on(LOOPBACK, dist.HashStore(), params)
    host, port = parse_rendezvous_endpoint(params.endpoint, _DEFAULT_PORT)
    read_timeout = params.get_as_int("read_timeout", _READ_TIMEOUT_SECONDS)
    seconds = float(read_timeout or _READ_TIMEOUT_SECONDS)
    store = _agents_store(host, port, seconds)
    return _listening_on(params.local_addr or route_to(host, store.port), store, params)


def _listening_on(
    address: str, store: dist.Store, params: RendezvousParameters
) -> RendezvousHandler:
    """Returns torch's rendezvous, with the store of the training ranks on one address."""

    def create(master_address: str, master_port: int) -> dist.TCPStore:
        return listening_store(
            master_address,
            None,
            _RANKS_STORE_TIMEOUT_SECONDS,
            port=master_port,
            setting="--local-addr",
        )

    params.local_addr = address
    handler = create_handler(store, C10dRendezvousBackend(store, params.run_id), params)
    # Torch has no setting for the address on which this store listens; its own takes all of them.
    assert hasattr(handler, "_create_tcp_store_server"), "torch's rendezvous has changed"
    handler._create_tcp_store_server = create  # pyright: ignore[reportAttributeAccessIssue]
    return handler


def _agents_store(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Returns the store of all agents: its server if this host has the address, else a client.

    A second agent on the host finds the port taken, and becomes a client.
    """
    try:
        return listening_store(host, None, timeout_seconds, port=port, setting="--rdzv-endpoint")
    except ValueError:
        pass  # the address is another host's
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    try:
        return dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds)
        )
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"The store at --rdzv-endpoint {host}:{port} must answer within {timeout_seconds:g} s, and "
            f"did not: {error} Check that torchrun runs on the host with that address, and that the "
            "port is open between the hosts."
        ) from error
