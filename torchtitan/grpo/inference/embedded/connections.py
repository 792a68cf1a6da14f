# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Bounds the connections of the server: how many there are, and how long they send nothing.

aiohttp waits for the first request of a connection without a limit, and accepts connections until
the process has no file descriptors left. Here a connection whose first headers do not arrive in
time is closed. If there are too many connections, the one that has waited longest for its first
headers is closed for the sake of the new one, so that connections which send nothing cannot keep
out those that do. If there is none, the new connection is closed.
"""

import asyncio
import logging
import resource
from collections.abc import Callable

logger = logging.getLogger(__name__)

_END_OF_HEADERS = b"\r\n\r\n"
# For files, the engine's own sockets, and connections that are just being refused.
_OTHER_DESCRIPTORS = 256
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 22\r\nConnection: close\r\n\r\nToo many connections.\n"
)


def raise_descriptor_limit(max_connections: int) -> int:
    """Raises this process's limit of open files as far as it may; returns how many connections fit.

    Args:
        max_connections: Number of connections that is wanted.
    """
    wanted = max_connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    fitting = max(1, soft - _OTHER_DESCRIPTORS)
    logger.warning(
        "Only %d connections are accepted at once, because at most %d files may be open (ulimit -n).",
        fitting,
        soft,
    )
    return fitting


class ConnectionLimits:
    """Makes the protocols of all connections, and counts them.

    Args:
        make_inner: Makes the protocol that serves a connection.
        max_connections: Maximum number of connections.
        header_seconds: Maximum time until the first headers of a connection are complete.
    """

    def __init__(
        self,
        make_inner: Callable[[], asyncio.Protocol],
        max_connections: int,
        header_seconds: float,
    ) -> None:
        self._make_inner = make_inner
        self.max_connections = max_connections
        self.header_seconds = header_seconds
        self.num_open = 0
        # In the order of their arrival; a dict, from which each can be removed at once.
        self.without_headers: dict[_LimitedProtocol, None] = {}

    def make_protocol(self) -> asyncio.Protocol:
        """Makes the protocol of one new connection."""
        return _LimitedProtocol(self, self._make_inner())

    def make_room(self) -> bool:
        """Returns whether one more connection may be served, for which another one may be closed."""
        if self.num_open < self.max_connections:
            return True
        oldest = next(iter(self.without_headers), None)
        if oldest is None:
            return False
        oldest.drop()
        return True


class _LimitedProtocol(asyncio.Protocol):
    """Passes everything on to the protocol that serves a connection, once it is accepted."""

    def __init__(self, limits: ConnectionLimits, inner: asyncio.Protocol) -> None:
        self._limits, self._inner = limits, inner
        self._is_served = False
        self._tail: bytes | None = b""  # None after the first headers
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "connections are TCP connections"
        self._transport = transport
        if not self._limits.make_room():
            logger.warning("A connection is refused: there are %d.", self._limits.num_open)
            transport.write(_BUSY)
            transport.close()
            return
        self._is_served = True
        self._limits.num_open += 1
        self._limits.without_headers[self] = None
        self._timer = asyncio.get_running_loop().call_later(self._limits.header_seconds, self.drop)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_served:
            return
        if self._tail is not None:
            seen = self._tail + data
            self._tail = seen[-len(_END_OF_HEADERS) + 1 :]
            if _END_OF_HEADERS in seen:
                self._tail = None
                self._stop_waiting()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_served else None

    def pause_writing(self) -> None:
        if self._is_served:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._is_served:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_served:
            self._leave()
            self._inner.connection_lost(exc)

    def drop(self) -> None:
        """Ends a connection that has not sent its first headers."""
        assert self._transport is not None, "it was accepted"
        self._stop_waiting()
        self._transport.abort()

    def _leave(self) -> None:
        self._stop_waiting()
        self._limits.num_open -= 1

    def _stop_waiting(self) -> None:
        self._limits.without_headers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
