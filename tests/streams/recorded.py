# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Streams, events and process groups of `recorder.py`, with the names and methods of torch's."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clocks import Clock, merge

if TYPE_CHECKING:
    from recorder import Recorder

# Held while transfers match and end. No thread learns from another one by it.
_matching = threading.RLock()


class Token:
    """One side's part of a transfer to or from another process."""

    def __init__(self, what: str, group: "Channel") -> None:
        self.what, self.group, self.is_done, self.clock = what, group, False, Clock()
        self._behind: list[Callable[[], object]] = []

    def then(self, call: Callable[[], object]) -> None:
        """Calls what is queued behind the transfer, now or when it is done."""
        with _matching:
            if self.is_done:
                call()
            else:
                self._behind.append(call)

    def finish(self) -> None:
        with _matching:
            self.is_done = True
            behind, self._behind = self._behind, []
            for call in behind:
                call()


@dataclass
class Access:
    begin: int
    end: int
    is_write: bool
    actor: str
    count: int
    what: str


@dataclass
class Memory:
    """A block of device memory, or pinned host memory; addresses are absolute."""

    begin: int
    end: int
    pool: "Stream | None"
    accesses: dict[tuple[int, int, bool, str], Access] = field(default_factory=dict)

    def add(self, access: Access) -> None:
        """Adds an access, in place of the same actor's earlier one of this kind and to these bytes."""
        self.accesses[access.begin, access.end, access.is_write, access.actor] = access


class Stream:
    """``torch.cuda.Stream``. It depends on the transfers that it waits for."""

    def __init__(self, recorder: "Recorder", process: str, name: str) -> None:
        self._recorder, self.process, self.actor = recorder, process, f"stream {process}/{name}"
        self.depends: set[Token] = set()
        self.last: Token | None = None  # the last transfer that was queued on the stream

    def queue(self, call: Callable[[], object]) -> None:
        """Calls what moves bytes, behind the transfers that are queued on the stream."""
        if self.last is None:
            call()
        else:
            self.last.then(call)

    def wait_event(self, event: "Event") -> None:
        self._recorder.order(self, event.clock, event.depends)

    def wait_stream(self, other: "Stream") -> None:
        self._recorder.order(self, self._recorder.clocks.now(other.actor), other.depends)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        event = Event(self._recorder)
        event.record(self)
        self._recorder.host_waits(event, f"{self.actor}")

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """``torch.cuda.Event``. An event that was never recorded is complete, as in CUDA."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.clock, self.depends = Clock(), set[Token]()
        self.recorded_at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._recorder.current_stream()
        self.clock = self._recorder.clocks.tick(stream.actor, self._recorder.clocks.release())
        self.depends = set(stream.depends)
        self.recorded_at = time.monotonic()

    def elapsed_time(self, end: "Event") -> float:
        """Returns milliseconds; as in CUDA, both events must be complete."""
        if self.recorded_at is None or end.recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.recorded_at - self.recorded_at)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._recorder.current_stream()).wait_event(self)

    def query(self) -> bool:
        self._recorder.needs_device("an event")
        if not all(token.is_done for token in self.depends):
            return False
        self._recorder.clocks.acquire(self.clock)
        for token in self.depends:
            self._recorder.clocks.acquire(token.clock)
        return True

    def synchronize(self) -> None:
        self._recorder.host_waits(self, "an event")


class Channel:
    """The process group of one trainer rank and one server worker."""

    def __init__(self, is_stopped: bool = False) -> None:
        self.is_stopped = is_stopped
        # Addresses and sizes: the kernel of a broadcast does not keep its tensor alive.
        self._waiting: dict[int, list[tuple[int, int, Token]]] = {0: [], 1: []}
        self._is_aborted = False

    def end(self, rank: int) -> "Group":
        return Group(self, rank)

    def is_awaited(self) -> bool:
        return bool(self._waiting[1])

    def post(self, rank: int, address: int, num_bytes: int, token: Token) -> None:
        with _matching:
            if self._is_aborted:
                token.finish()
                return
            self._waiting[rank].append((address, num_bytes, token))
            self.match()

    def match(self) -> None:
        with _matching:
            while self._waiting[0] and self._waiting[1] and not self.is_stopped:
                source, num_bytes, sent = self._waiting[0].pop(0)
                target, expected, received = self._waiting[1].pop(0)
                assert num_bytes == expected, "both sides name one size"
                ctypes.memmove(target, source, num_bytes)
                # Nothing is known the other way round: the sender's kernel may end first.
                merge(received.clock, sent.clock)
                received.finish()
                sent.finish()

    def abort(self) -> None:
        """As NCCL does: the kernels end, without the bytes."""
        with _matching:
            self._is_aborted = True
            ended = [token for waiting in self._waiting.values() for _, _, token in waiting]
            self._waiting = {0: [], 1: []}
            for token in ended:
                token.finish()


@dataclass(frozen=True)
class Group:
    channel: Channel
    rank: int


class Work:
    """What ``dist.broadcast(async_op=True)`` returns."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, *timeout: object) -> bool:
        self._event.wait()
        return True
