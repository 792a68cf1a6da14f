# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Limits the connections of an HTTP server, which aiohttp and uvicorn do not do.

A connection is closed if a request's headers are late. At the limit, an old connection is closed to make
room for a new one. Servers in other Python environments use this module: it needs no other packages.
"""

import asyncio
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)

HEADER_SECONDS = 10.0
"""Maximum time for the headers of a request, counted from its first byte."""
MAX_CONNECTIONS = 16_384
_BODY_SECONDS = 60.0
_BODY_GRACE_SECONDS = 10.0
_SLOWEST_BYTES_PER_SECOND = 4096
SLOW_BODY = (
    f"The body must arrive within {_BODY_SECONDS:g} s, and from {_BODY_GRACE_SECONDS:g} s on with at least "
    f"{_SLOWEST_BYTES_PER_SECOND} bytes per second."
)
# For files, the engine's own sockets, and connections that are just being refused.
_OTHER_DESCRIPTORS = 256
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 22\r\nConnection: close\r\n\r\nToo many connections.\n"
)


def body_seconds(num_bytes: int, most: float = _BODY_SECONDS) -> float:
    """Returns within how many seconds more than ``num_bytes`` of a request's body must have arrived."""
    return min(most, _BODY_GRACE_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND)


def raise_descriptor_limit(max_connections: int) -> int:
    """Raises the limit of open files if needed. Returns how many of ``max_connections`` fit into it."""
    wanted = max_connections + _OTHER_DESCRIPTORS
    if (soft := raise_file_limit(wanted)) >= wanted:
        return max_connections
    fitting = max(1, soft - _OTHER_DESCRIPTORS)
    logger.warning(
        "Only %d connections are accepted at once, because at most %d files may be open (ulimit -n).",
        fitting,
        soft,
    )
    return fitting


def raise_file_limit(wanted: int) -> int:
    """Raises the limit of open files to ``wanted`` if possible. Returns ``wanted``, or the limit if lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class ConnectionLimits:
    def __init__(
        self,
        make_inner: Callable[[], asyncio.BaseProtocol],
        max_connections: int = MAX_CONNECTIONS,
        header_seconds: float = HEADER_SECONDS,
    ) -> None:
        self._make_inner = make_inner
        self.max_connections = max_connections
        self.header_seconds = header_seconds
        self.num_open = 0
        # By whether they are busy and have a key, and by host, in the order in which they became so;
        # dicts, from which each can be removed at once.
        self._open: dict[tuple[bool, bool], dict[str, dict[_LimitedProtocol, None]]] = {}

    def make_protocol(self) -> asyncio.Protocol:
        return _LimitedProtocol(self, self._make_inner())

    def make_room(self, host: str) -> bool:
        """Returns whether a new connection of ``host`` may be served, and may close another one for it.

        At the limit, this closes the longest idle connection of the host that has the most idle ones.
        Connections with a key are closed only if all others are busy. If none is idle, this closes the
        oldest busy one without a key, of the host with the most such connections, if ``host`` has at
        least two fewer. So a host shuts out only itself, and clients without a key none that have one.
        """
        if self.num_open < self.max_connections:
            return True
        chosen = self._oldest_of_most(False, False) or self._oldest_of_most(False, True)
        if chosen is None:
            chosen, busy = self._oldest_of_most(True, False), self._open.get((True, False), {})
            if chosen is None or len(busy[chosen.host]) <= len(busy.get(host, ())) + 1:
                return False
        chosen.drop()
        return True

    def note(self, connection: "_LimitedProtocol") -> None:
        self.forget(connection)
        self.num_open += 1
        connection.place = connection.is_busy, connection.has_key
        by_host = self._open.setdefault(connection.place, {})
        by_host.setdefault(connection.host, {})[connection] = None

    def forget(self, connection: "_LimitedProtocol") -> None:
        """Stops counting a connection. Further calls do nothing."""
        if connection.place is None:
            return
        by_host, connection.place = self._open[connection.place], None
        self.num_open -= 1
        del by_host[connection.host][connection]
        if not by_host[connection.host]:
            del by_host[connection.host]

    def _oldest_of_most(self, is_busy: bool, has_key: bool) -> "_LimitedProtocol | None":
        by_host = self._open.get((is_busy, has_key))
        return next(iter(max(by_host.values(), key=len))) if by_host else None


@contextmanager
def answering(*, has_key: bool = False) -> Iterator[None]:
    """Marks a connection as busy during the block, in which the current task answers its request."""
    connection = _connection.get()
    if connection is None:  # the server is not behind limits
        yield
        return
    connection.begin(has_key)
    try:
        yield
    finally:
        connection.end()


class _LimitedProtocol(asyncio.Protocol):
    """A connection's protocol. If the limits allow the connection, passes everything to the inner protocol."""

    def __init__(self, limits: ConnectionLimits, inner: Any) -> None:
        self._limits, self._inner = limits, inner
        self._is_served = self.is_busy = self.has_key = False
        self.place: tuple[bool, bool] | None = None  # None unless it is open
        self.host = ""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if peer else ""  # a Unix socket has no peer
        if not self._limits.make_room(self.host):
            logger.warning("A connection is refused: there are %d.", self._limits.num_open)
            self._transport.write(_BUSY)
            self._transport.close()
            return
        self._is_served = True
        self._limits.note(self)
        self._await_headers()
        _connection.set(self)  # for the tasks that the inner protocol creates
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_served:
            return
        self._await_headers()  # of the next request of a connection that is kept
        _connection.set(self)
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

    def begin(self, has_key: bool) -> None:
        self._stop_waiting()
        self.is_busy, self.has_key = True, self.has_key or has_key
        self._renew()

    def end(self) -> None:
        self.is_busy = False
        if self._transport.get_protocol() is not self:  # it was a web socket
            self._leave()
        self._renew()

    def drop(self) -> None:
        self._leave()
        self._transport.abort()

    def _await_headers(self) -> None:
        if self._timer is None and not self.is_busy:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limits.header_seconds, self.drop)

    def _renew(self) -> None:
        if self.place is not None:
            self._limits.note(self)

    def _leave(self) -> None:
        self._stop_waiting()
        self._limits.forget(self)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_connection: ContextVar[_LimitedProtocol | None] = ContextVar("connection", default=None)
