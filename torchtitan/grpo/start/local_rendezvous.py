# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rendezvous for torchrun's agent where all ranks are on one host.

    torchrun --rdzv-backend torchtitan_grpo --nproc_per_node=2 -m torchtitan.grpo_train ...

Torchrun's own rendezvous (also ``--standalone``) listens on every interface, and its agent unpickles
what it finds in the store: whoever reaches the port can run code as the user. Here the agent's data
stays in memory. Only the ranks' store, from which nothing is unpickled, has a socket, on loopback.
Torchrun finds this rendezvous by the entry point ``torchrun.handlers``.
"""

import contextlib
import os
import signal

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from torchtitan.grpo.system.groups import listening_store
from torchtitan.grpo.system.stop import stop_signals

BACKEND = "torchtitan_grpo"
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 300.0


class LocalRendezvous(RendezvousHandler):
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._memory = dist.HashStore()
        self._ranks_store: dist.TCPStore | None = None
        self._num_rounds = 0
        self._is_closed = False

    @classmethod
    def make(cls, params: RendezvousParameters) -> "LocalRendezvous":
        """Makes the rendezvous. Raises ValueError if the settings are for several hosts."""
        if params.endpoint or params.max_nodes > 1:
            raise ValueError(
                f"--rdzv-backend {BACKEND} is for one host: --nnodes must be 1 and --rdzv-endpoint left "
                f"out, got {params.min_nodes}:{params.max_nodes} and {params.endpoint!r}. "
                "docs/security.md tells what to do on several hosts."
            )
        # Torchrun would pass SIGHUP on, also under nohup; to rank 0 it may mean something else.
        handled = os.environ.get(_HANDLED, "")
        if "SIGHUP" in handled:
            os.environ[_HANDLED] = handled.replace("SIGHUP", "SIGTERM")
            if signal.SIGHUP in stop_signals():
                signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        return cls(params.run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns rank 0 of one node, with a new store, since earlier ranks' keys would mislead new ranks."""
        self._num_rounds += 1
        self._ranks_store = listening_store(_LOOPBACK, None, _TIMEOUT_SECONDS)
        store = dist.PrefixStore(f"round-{self._num_rounds}", self._memory)
        address = RendezvousStoreInfo(_LOOPBACK, self._ranks_store.port)
        return RendezvousInfo(store, 0, 1, address)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agent's store, which is always true here."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._ranks_store = None
        return True


def register() -> None:
    """Makes the rendezvous known to torch as :data:`BACKEND`."""
    # Where this package is installed, torch has registered its entry point under the name already.
    with contextlib.suppress(ValueError):
        rendezvous_handler_registry.register(BACKEND, LocalRendezvous.make)
