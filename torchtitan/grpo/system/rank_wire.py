# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The lines that ranks send each other about their state, and one end of such a connection."""

import socket
import time

import msgspec

from torchtitan.grpo.system.rank_status import Status

_SEND_SECONDS = 5.0
_MAX_LINE_BYTES = 65536


class LostRank(msgspec.Struct, frozen=True):
    """A rank that is no longer there.

    Attributes:
        status: What it did last.
        silent_seconds: For how long it was silent; 0 if its connection was closed.
        has_reported: Whether it said before that it fails, and so reports the reason itself.
    """

    status: Status
    silent_seconds: float = 0.0
    has_reported: bool = False


class Line(msgspec.Struct, omit_defaults=True):
    """One message.

    Attributes:
        status: Status of the sender.
        secret: Shows, in the first line of a connection, that the sender is a rank of the run.
        farewell: Whether the sender ends, so that the end of the connection is no loss.
        failed: Whether it ends with an error.
        lost: A rank that rank 0 has lost.
    """

    status: Status | None = None
    secret: str | None = None
    farewell: bool = False
    failed: bool = False
    lost: LostRank | None = None


class Peer:
    """One end of a connection with another rank.

    Args:
        connection: The connected socket.

    Attributes:
        status: Newest status of the other rank; None before its first line.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        self.connection = connection
        self.status: Status | None = None
        self._buffer = b""
        self._heard_at = time.monotonic()
        self._has_left = self._has_failed = False

    def send(self, line: Line) -> None:
        """Sends a line. A peer that does not take it is found by its silence or its end."""
        try:
            self.connection.sendall(msgspec.json.encode(line) + b"\n")
        except OSError:
            return

    def receive(self) -> list[Line] | None:
        """Returns the lines that have arrived, or None if the connection cannot be used any more."""
        try:
            data = self.connection.recv(_MAX_LINE_BYTES)
        except OSError:
            data = b""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > _MAX_LINE_BYTES:
            return None
        try:
            lines = [msgspec.json.decode(text, type=Line) for text in whole]
        except msgspec.DecodeError:
            return None
        if lines:  # a part of a line, which a stranger can send byte by byte, does not count
            self._heard_at = time.monotonic()
        for line in lines:
            self.status = line.status or self.status
            self._has_left |= line.farewell
            self._has_failed |= line.failed
        return lines

    def loss(self, silent_seconds: float = 0.0) -> LostRank | None:
        """Returns the loss of this peer, or None if it has no status yet or has ended in order."""
        if self.status is None or (self._has_left and not self._has_failed):
            return None
        return LostRank(self.status, silent_seconds, self._has_failed)

    @property
    def silent_seconds(self) -> float:
        """Time since the last whole line, or since the connection was made."""
        return time.monotonic() - self._heard_at

    def silence(self, bound_seconds: float) -> LostRank | None:
        """Returns the loss of a peer that has been silent for longer than the bound."""
        seconds = self.silent_seconds
        return self.loss(seconds) if seconds > bound_seconds else None
