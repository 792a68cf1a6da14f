# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every rank learns within a bound that another rank has died, and what that rank was doing.

Collectives do not tell: one that waits for a dead rank ends with an error about a connection, or
only at its timeout. Each rank therefore keeps a connection with rank 0 and sends its status over it
whenever that changes, and once a second. A connection that closes without a farewell means that the
process has died; one that stays silent means that the process is frozen or that its host is gone.
Rank 0 tells the others which rank it was, and each of them sees by itself if it was rank 0.

Rank 0 listens where the other ranks reach it, or on loopback if all are on one host. The first line
on a connection must carry a secret, which rank 0 gives the ranks over the process group.
"""

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from torchtitan.grpo.system.groups import leader_address
from torchtitan.grpo.system.rank_status import Status, StatusBoard
from torchtitan.grpo.system.rank_wire import Line, LostRank, Peer

_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_STRANGER_SECONDS = 10.0
_MAX_STRANGERS = 64


class RankLost(RuntimeError):
    """Raised on a rank that cannot go on because another one is lost, which has been reported."""


class RankWatch:
    """Watches the other ranks on a thread of its own, and holds the status of this one.

    Args:
        silence_seconds: After so much silence a rank counts as lost.
        on_lost: Called on that thread when a rank is lost, once.

    Attributes:
        board: The status of this rank.
        lost: The rank that was lost first; None while all are there.
    """

    def __init__(self, silence_seconds: float, on_lost: Callable[[LostRank], None]) -> None:
        self._silence_seconds, self._on_lost = silence_seconds, on_lost
        self.lost: LostRank | None = None
        self._lost_event = threading.Event()  # set when the loss has been reported
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write):
            end.setblocking(False)
        self.board = StatusBoard(self._notify)
        self._is_closing = self._has_failed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None  # on rank 0
        self._secret = ""
        self._max_strangers = _MAX_STRANGERS
        self._peers: dict[socket.socket, Peer] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts watching. Collective over all ranks, once the process group exists."""
        if dist.get_world_size() == 1:
            return
        where: list[tuple[str, int, str] | None] = [None]
        if dist.get_rank() == 0:
            self._listener = socket.create_server((leader_address(), 0))
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._secret = secrets.token_hex(16)
            self._max_strangers += dist.get_world_size()  # all ranks may connect at once
            host, port = self._listener.getsockname()[:2]
            where[0] = host, port, self._secret
        dist.broadcast_object_list(where, src=0)
        if where[0] is not None and self._listener is None:
            host, port, secret = where[0]
            leader = self._add(socket.create_connection((host, port), _CONNECT_SECONDS))
            leader.status = Status(0, host, 0)  # until rank 0 has sent its own
            leader.send(Line(self.board.current, secret))
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def raise_if_lost(self) -> None:
        """Raises :class:`RankLost` if a rank is lost."""
        if self.lost is not None:
            raise RankLost(f"Training rank {self.lost.status.rank} is lost.")

    def wait_lost(self, timeout_seconds: float) -> bool:
        """Waits until the loss of a rank has been reported, at most ``timeout_seconds``.

        Returns:
            Whether the loss of a rank has been reported. If so, ``on_lost`` has returned, and the
            caller may end the process.
        """
        return self._thread is not None and self._lost_event.wait(timeout_seconds)

    def close(self, *, failed: bool = False) -> None:
        """Says farewell to the other ranks and ends the thread. Further calls do nothing.

        Args:
            failed: Whether this rank ends with an error, so that the others cannot go on.
        """
        if not self._is_closing:
            self._is_closing, self._has_failed = True, failed
            self._notify()
            if self._thread is not None:
                self._thread.join(_CLOSE_SECONDS)
            self.board.close()

    def _notify(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:  # full, so that the thread is about to wake up
            return

    def _run(self) -> None:
        beat_at = time.monotonic()
        while True:
            self._drop_strangers()
            keys = {key.fileobj for key, _ in self._selector.select(_BEAT_SECONDS / 2)}
            found = [self._hear(key) for key in keys if isinstance(key, socket.socket)]
            found += [peer.silence(self._silence_seconds) for peer in self._peers.values()]
            for lost in filter(None, found):
                self._report(lost)
            is_closing = self._is_closing
            if is_closing or self._wake in keys or time.monotonic() - beat_at > _BEAT_SECONDS:
                beat_at = time.monotonic()
                self._tell(Line(self.board.current, farewell=is_closing, failed=self._has_failed))
            if is_closing:
                self._close_all()
                return

    def _hear(self, ready: socket.socket) -> LostRank | None:
        """Reads what has arrived on a socket; returns the rank that was lost with it."""
        if ready is self._wake:
            ready.recv(4096)
        elif ready is self._listener:
            try:
                self._add(ready.accept()[0])
            except OSError:  # it has left, or too many files are open, until strangers are dropped
                return None
        else:
            return self._hear_peer(self._peers[ready])
        return None

    def _hear_peer(self, peer: Peer) -> LostRank | None:
        is_stranger = self._listener is not None and peer.status is None
        lines = peer.receive()
        if lines and is_stranger:
            if not self._is_known(lines[0]):
                self._remove(peer)
                return None
            peer.send(Line(self.board.current))
        if lines is None:
            self._remove(peer)
            return peer.loss()
        return next((line.lost for line in lines if line.lost is not None), None)

    def _is_known(self, first: Line) -> bool:
        return secrets.compare_digest(
            (first.secret or "").encode(errors="replace"), self._secret.encode()
        )

    def _drop_strangers(self) -> None:
        """Ends connections that do not tell the secret in time, and the oldest if there are too many."""
        if self._listener is None:
            return
        strangers = [peer for peer in self._peers.values() if peer.status is None]
        for peer in strangers:
            is_surplus = len(strangers) > self._max_strangers and peer is strangers[0]
            if is_surplus or peer.silent_seconds > _STRANGER_SECONDS:
                self._remove(peer)

    def _report(self, lost: LostRank) -> None:
        if self.lost is None:
            self.lost = lost
            self._tell(Line(lost=lost) if self._listener is not None else Line())
            self._on_lost(lost)
            self._lost_event.set()

    def _tell(self, line: Line) -> None:
        for peer in self._peers.values():
            if self._listener is None or peer.status is not None:  # strangers are told nothing
                peer.send(line)

    def _add(self, connection: socket.socket) -> Peer:
        self._peers[connection] = peer = Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        return peer

    def _remove(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        peer.connection.close()

    def _close_all(self) -> None:
        for peer in list(self._peers.values()):
            self._remove(peer)
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
