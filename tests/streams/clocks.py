# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of events on host threads and device streams, as vector clocks.

    An actor is a host thread or a stream. Each has a clock: how many events of every actor are
    known to be over when the actor's next event happens. Two accesses to the same memory, one of
    them a write, are a race unless the later one's clock contains the earlier one.
    (L. Lamport, 1978; C. Fidge and F. Mattern, 1988.)

Threads exchange clocks through locks, queues, and the starting and joining of threads;
:func:`traced_threads` replaces these by ones that carry clocks.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Clock = dict[str, int]


def merge(into: Clock, other: Clock) -> None:
    for actor, count in other.items():
        if count > into.get(actor, 0):
            into[actor] = count


class Clocks:
    """The clocks of all actors. Its methods are atomic."""

    def __init__(self) -> None:
        self._of: dict[str, Clock] = {}
        # Reentrant, since a tensor may be collected, and so freed, while a thread holds it.
        self._lock = _RealRLock()
        self._local = threading.local()
        self._num_threads = 0

    def thread(self) -> str:
        name = getattr(self._local, "actor", None)
        if name is None:
            with self._lock:
                self._num_threads += 1
                # Without the thread's name, since asking for it takes locks while it starts.
                name = self._local.actor = f"thread {self._num_threads}"
        return name

    def now(self, actor: str) -> Clock:
        with self._lock:
            return dict(self._of.get(actor, {}))

    def tick(self, actor: str, *after: Clock) -> Clock:
        """Makes an event of ``actor`` happen, after ``after``; returns the actor's clock then."""
        with self._lock:
            clock = self._of.setdefault(actor, {})
            for other in after:
                merge(clock, other)
            clock[actor] = clock.get(actor, 0) + 1
            return dict(clock)

    def release(self) -> Clock:
        """Returns what another thread learns from the current one here."""
        return self.now(self.thread())

    def acquire(self, clock: Clock | None) -> None:
        if clock:
            actor = self.thread()
            with self._lock:
                merge(self._of.setdefault(actor, {}), clock)


_RealLock, _RealRLock, _RealQueue = threading.Lock, threading.RLock, queue.SimpleQueue


class _TracedLock:
    """A lock that hands the clock of who releases it to who acquires it."""

    def __init__(self, clocks: Clocks, lock: Any) -> None:
        self._clocks, self._lock, self._clock = clocks, lock, Clock()

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        got = self._lock.acquire(*args, **kwargs)
        if got:
            self._clocks.acquire(self._clock)
        return got

    def release(self) -> None:
        merge(self._clock, self._clocks.release())
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _TracedRLock(_TracedLock):
    """Has what :class:`threading.Condition` needs of a reentrant lock."""

    def _is_owned(self) -> bool:
        return self._lock._is_owned()

    def _release_save(self) -> Any:
        merge(self._clock, self._clocks.release())
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._clocks.acquire(self._clock)


class _TracedQueue:
    """A queue that carries with each item the clock of who put it there."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self._queue = clocks, _RealQueue()

    def put(self, item: object, *args: Any) -> None:
        self._queue.put((item, self._clocks.release()))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        item, clock = self._queue.get(*args, **kwargs)
        self._clocks.acquire(clock)
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return self._queue.empty()

    def qsize(self) -> int:
        return self._queue.qsize()


@contextmanager
def traced_threads(
    clocks: Clocks, inherit: Callable[[], Any], around: Callable[[Any, Callable[[], None]], None]
) -> Iterator[None]:
    """Makes what is created within the block carry clocks from thread to thread."""
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def traced_start(thread: Any) -> None:
        thread.born_with, thread.inherited = clocks.release(), inherit()
        start(thread)

    def traced_run(thread: Any) -> None:
        if hasattr(thread, "born_with"):
            clocks.acquire(thread.born_with)
            around(thread.inherited, lambda: run(thread))
            thread.left_with = clocks.release()
        else:  # started before the block
            run(thread)

    def traced_join(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            clocks.acquire(getattr(thread, "left_with", None))

    def traced_call_soon(loop: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        clock = clocks.release()

        def called(*args: Any) -> None:
            clocks.acquire(clock)
            callback(*args)

        return call_soon(loop, called, *args, context=context)

    with (
        mock.patch.object(threading, "Lock", lambda: _TracedLock(clocks, _RealLock())),
        mock.patch.object(threading, "RLock", lambda: _TracedRLock(clocks, _RealRLock())),
        mock.patch.object(queue, "SimpleQueue", lambda: _TracedQueue(clocks)),
        mock.patch.object(threading.Thread, "start", traced_start),
        mock.patch.object(threading.Thread, "run", traced_run),
        mock.patch.object(threading.Thread, "join", traced_join),
        mock.patch.object(asyncio.BaseEventLoop, "call_soon_threadsafe", traced_call_soon),
    ):
        yield
