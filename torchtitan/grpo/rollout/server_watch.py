# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The current servers of a run, as rank 0 knows them from the rollout process.

Changes arrive on a separate socket, so that a thread that reads them does not wait for the
thread that receives batches, which may be inside a training step.
"""

import threading

import zmq

from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.types import ServerInfo


class ServerWatch:
    """The newest list of servers, from a PULL socket. Thread-safe, and no method waits."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._lock = threading.Lock()
        self._socket: zmq.Socket | None = socket
        self._servers: list[ServerInfo] | None = None
        self._has_news = False

    def begin(self, servers: list[ServerInfo]) -> None:
        """Sets the initial list of servers, unless a newer list has already arrived."""
        with self._lock:
            self._receive()
            if self._servers is None:
                self._servers = servers

    def renew(self, servers: list[ServerInfo]) -> None:
        """Sets the servers of a restarted process. This counts as a change even if the list is the same."""
        with self._lock:
            self._receive()
            self._servers, self._has_news = servers, True

    def reconnect(self, socket: zmq.Socket) -> None:
        """Listens to a restarted process. The known servers stay until that process reports its own."""
        self.close()
        with self._lock:
            self._socket = socket

    def servers(self) -> list[ServerInfo]:
        with self._lock:
            self._receive()
            return list(self._servers or ())

    def poll(self) -> list[ServerInfo] | None:
        """Returns the servers if they changed since the last call, else None.

        Each change is reported once, so there must be only one caller.
        """
        with self._lock:
            self._receive()
            has_news, self._has_news = self._has_news, False
            return list(self._servers or ()) if has_news else None

    def close(self) -> None:
        """Closes the socket. The known servers stay available."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
            self._socket = None

    def _receive(self) -> None:
        while self._socket is not None and self._socket.poll(0):
            self._servers = link_messages.decode_servers(self._socket.recv())
            self._has_news = True
