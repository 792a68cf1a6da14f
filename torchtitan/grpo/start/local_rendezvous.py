# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rendezvous for torchrun's agent where all ranks are on one host.

Torchrun's own rendezvous, that of ``--standalone`` included, listens on every interface, and its agent
unpickles what it finds in the store: whoever reaches the port runs code as the user. With a single agent
there is nobody to meet. What the agent notes for itself stays in its memory, and only the store of the
training ranks, from which nothing is unpickled, has a socket. It listens on loopback.

    torchrun --rdzv-backend torchtitan_grpo --nproc_per_node=2 -m torchtitan.grpo_train ...

Torchrun finds it by the entry point ``torchrun.handlers`` of this package.
"""

import contextlib

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from torchtitan.grpo.system.groups import listening_store

BACKEND = "torchtitan_grpo"
_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 300.0


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of the only agent of a run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._memory = dist.HashStore()
        self._ranks_store: dist.TCPStore | None = None
        self._num_rounds = 0
        self._is_closed = False

    @classmethod
    def make(cls, params: RendezvousParameters) -> "LocalRendezvous":
        """Returns the rendezvous for torchrun's settings.

        Raises:
            ValueError: If they are those of several hosts.
        """
        if params.endpoint or params.max_nodes > 1:
            raise ValueError(
                f"--rdzv-backend {BACKEND} is for one host: --nnodes must be 1 and --rdzv-endpoint left "
                f"out, got {params.min_nodes}:{params.max_nodes} and {params.endpoint!r}. "
                "docs/security.md tells what to do on several hosts."
            )
        return cls(params.run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the place of the only agent, with a new store for the ranks.

        Restarted ranks must not find the keys of those before them.
        """
        self._num_rounds += 1
        self._ranks_store = listening_store(_LOOPBACK, None, _TIMEOUT_SECONDS)
        store = dist.PrefixStore(f"round-{self._num_rounds}", self._memory)
        address = RendezvousStoreInfo(_LOOPBACK, self._ranks_store.port)
        return RendezvousInfo(store, 0, 1, address)

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to the store of this process, and open none."""
        return True

    def get_backend(self) -> str:
        """Returns the name under which the rendezvous is registered."""
        return BACKEND

    def is_closed(self) -> bool:
        """Returns whether the run has ended."""
        return self._is_closed

    def set_closed(self) -> None:
        """Notes that the run has ended."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Returns 0: there are no other agents."""
        return 0

    def get_run_id(self) -> str:
        """Returns the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Closes the store of the ranks."""
        self._ranks_store = None
        return True


def register() -> None:
    """Makes the rendezvous known to torch under the name :data:`BACKEND`."""
    # Where this package is installed, torch has registered its entry point under the name already.
    with contextlib.suppress(ValueError):
        rendezvous_handler_registry.register(BACKEND, LocalRendezvous.make)
