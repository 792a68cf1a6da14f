# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rendezvous of the nodes of a run: torch's c10d rendezvous with three differences.

- Its stores listen on one address. Torch's stores listen on all interfaces, and whoever can connect
  to a store can put something into it that a rank unpickles.
- The node with the rendezvous's store has rank 0 in every round. Torch sorts nodes by address, so the
  rollout process and registry, which run beside rank 0, could move when a node is replaced.
- Each round has a new store for the ranks. Torch keeps the first store: a node that joins later waits
  in vain for this store's address, and restarted ranks read the keys of the ranks before them
  (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py).
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from torchtitan.grpo.system.groups import listening_store
from torchtitan.grpo.system.waits import Reminders

BACKEND = "torchtitan-grpo"
"""Name of the rendezvous for torch."""

# How long a link between nodes may be down before the agents behind it give up.
_READ_SECONDS = 300.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Node:
    """This node. Its stores listen on ``address``. With ``holds_store``, it has the rendezvous's store.

    Each round waits up to ``join_seconds`` for all nodes.
    """

    address: str
    endpoint: tuple[str, int]
    holds_store: bool
    num_ranks: int
    join_seconds: float


class NodeRendezvous(RendezvousHandler):
    """This node's part in the rendezvous. ``tell`` is called with messages for the user.

    Raises OSError if the endpoint is here but cannot be used, and TimeoutError if it is unreachable.
    """

    def __init__(
        self, node: Node, parameters: RendezvousParameters, tell: Callable[[str], None]
    ) -> None:
        self._node, self._tell = node, tell
        # Torch's handler then makes no store, which would listen on all interfaces.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store = self._open_store()
        if node.holds_store:
            store.set("launch", uuid.uuid4().hex)
        self._launch = store.get("launch").decode()
        backend = C10dRendezvousBackend(store, parameters.run_id)
        self._inner = create_handler(store, backend, parameters)
        self._ranks_store: dist.TCPStore | None = None
        self._num_rounds = 0

    def _open_store(self) -> dist.TCPStore:
        host, port = self._node.endpoint
        if self._node.holds_store:
            return listening_store(host, None, _READ_SECONDS, port)
        reminders, begin = Reminders(), time.monotonic()
        while not _is_reachable(host, port):
            waited = time.monotonic() - begin
            if waited > self._node.join_seconds:
                raise TimeoutError(
                    f"The node at {host}:{port} must answer within {self._node.join_seconds:.0f} s. "
                    "Start the same command there, and check that no firewall is between."
                )
            if reminders.is_due(waited):
                self._tell(f"this node has waited {waited:.0f} s for the node at {host}:{port}")
            time.sleep(_POLL_SECONDS)
        return dist.TCPStore(host, port, timeout=timedelta(seconds=_READ_SECONDS))

    def next_rendezvous(self) -> RendezvousInfo:
        self._num_rounds += 1
        again = "" if self._num_rounds == 1 else " again"
        self._tell(f"waiting until all nodes are there{again}")
        info = self._inner.next_rendezvous()
        rank = self._rank_of(info)
        # The ranks of the round before have ended, and with them the use of their store.
        self._ranks_store = None
        if rank == 0:
            self._ranks_store = listening_store(self._node.address, None, _READ_SECONDS)
            info.store.set("ranks_at", f"{self._node.address} {self._ranks_store.port}")
        address, port = info.store.get("ranks_at").decode().split()
        self._tell(self._describe(info, rank, address))
        return RendezvousInfo(
            info.store, rank, info.world_size, RendezvousStoreInfo(address, int(port))
        )

    def _rank_of(self, info: RendezvousInfo) -> int:
        """Returns this node's rank in torch's order, with the node that holds the store moved to the front."""
        if self._node.holds_store:
            info.store.set("first_node", str(info.rank))
            return 0
        first = int(info.store.get("first_node"))
        return info.rank + 1 if info.rank < first else info.rank

    def _describe(self, info: RendezvousInfo, rank: int, address: str) -> str:
        info.store.set(f"num_ranks/{rank}", str(self._node.num_ranks))
        counts = [int(info.store.get(f"num_ranks/{other}")) for other in range(info.world_size)]
        begin, end = sum(counts[:rank]), sum(counts[: rank + 1]) - 1
        here = f"rank {begin} is" if begin == end else f"ranks {begin} to {end} are"
        nodes = "1 node" if info.world_size == 1 else f"{info.world_size} nodes"
        return (
            f"round {self._num_rounds}: {nodes} with {sum(counts)} ranks, of which "
            f"{here} here; rank 0 is at {address}"
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Returns an id that is the same on all nodes, and stays when ranks are restarted."""
        return f"{self._inner.get_run_id()}-{self._launch}"

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def _is_reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return True
    except OSError:
        return False
