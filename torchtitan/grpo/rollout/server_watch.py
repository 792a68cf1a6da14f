# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which servers a run has, as rank 0 knows it from the rollout process.

A socket of its own brings the news, so whoever asks need not wait for the thread that
receives batches, which may be inside a training step.
"""

import threading

import zmq

from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.types import ServerInfo


class ServerWatch:
    """The newest list of servers. Any thread may ask, and nothing here waits.

    Args:
        socket: PULL, connected to the rollout process; it is closed here.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._lock = threading.Lock()
        self._socket: zmq.Socket | None = socket
        self._servers: list[ServerInfo] | None = None
        self._has_news = False

    def begin(self, servers: list[ServerInfo]) -> None:
        """Takes the servers of the start, unless there is later news already."""
        with self._lock:
            self._receive()
            if self._servers is None:
                self._servers = servers

    def renew(self, servers: list[ServerInfo]) -> None:
        """Takes the servers of a process that was started anew, which is news in any case."""
        with self._lock:
            self._receive()
            self._servers, self._has_news = servers, True

    def reconnect(self, socket: zmq.Socket) -> None:
        """Listens to another process from here on; what was known stays known until then."""
        self.close()
        with self._lock:
            self._socket = socket

    def servers(self) -> list[ServerInfo]:
        """The servers of now; none before the rollout process is ready."""
        with self._lock:
            self._receive()
            return list(self._servers or ())

    def poll(self) -> list[ServerInfo] | None:
        """The servers of now where they have changed since the last call, else None.

        Changes are counted from the start of the run. For one caller: it hears of each change
        once.
        """
        with self._lock:
            self._receive()
            has_news, self._has_news = self._has_news, False
            return list(self._servers or ()) if has_news else None

    def close(self) -> None:
        """Closes the socket; what was known stays known. Idempotent."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
            self._socket = None

    def _receive(self) -> None:
        while self._socket is not None and self._socket.poll(0):
            self._servers = link_messages.decode_servers(self._socket.recv())
            self._has_news = True
