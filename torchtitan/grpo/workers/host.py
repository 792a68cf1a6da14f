# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The code of a worker process, which loads the user's code and answers calls of it concurrently.

The owner may kill the process at any time. Its threads are::

    requests      reads the pipe
    calls         the event loop that awaits async functions and sends the replies
    watch         tells where that loop is blocked
    main thread   runs synchronous functions one by one, where signals and asyncio.run work
    call-N        run synchronous functions, if several may run at a time
"""

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from torchtitan.grpo.system.functions import describe_error, failure_kind, user_line
from torchtitan.grpo.workers.channel import NotPlainData, WorkerChannel, refused

Result = TypeVar("Result")

_BLOCKED_SECONDS, _LOOK_SECONDS = 5.0, 1.0


class Cancel(msgspec.Struct, tag=True):
    """Asks a worker to cancel its work on the request ``number``, which then gets no reply."""

    number: int


class Cancelled(msgspec.Struct, tag=True):
    """Reply to :class:`Cancel`. The call ``hangs`` if it is a synchronous one, which cannot be cancelled."""

    hangs: bool


@dataclass(frozen=True)
class Loaded:
    """The user's code. ``what`` names it in messages, and ``reply`` tells the owner that it is loaded.

    ``answer`` is called with every further request, each with its own ``number``, and returns the
    reply. To run blocking work, it awaits `Host.in_thread`, which has ``num_threads`` threads; a single one
    is the main thread. Error messages quote lines of ``function``.
    """

    what: str
    reply: Any
    answer: Callable[["Host", Any], Awaitable[Any]]
    num_threads: int = 0
    function: Callable[..., Any] | None = None


def serve(decode_request: Callable[[bytes], Any], load: Callable[[Any], Loaded]) -> None:
    """Serves the owner until the owner closes the channel. ``load`` is called with the first request.

    If ``load`` raises ValueError, the message must say what the user can do.
    """
    channel = WorkerChannel(decode_request)
    if (received := channel.read()) is None:
        return
    call, request = received
    try:
        loaded = load(request)
    except ValueError as error:
        channel.reply(call, refused("load", str(error)))
        return
    channel.reply(call, loaded.reply)
    Host(channel, loaded).run()


class Host:
    """Answers calls on an event loop, and runs what may block in other threads."""

    def __init__(self, channel: WorkerChannel[Any], loaded: Loaded) -> None:
        self._channel, self._loaded = channel, loaded
        self._loop = asyncio.new_event_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._in_thread: set[int] = set()
        self._cancelling: set[asyncio.Task[None]] = set()
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()

    def run(self) -> None:
        loop = _start_thread("calls", self._run_loop)
        _start_thread("watch", lambda: self._watch(loop))
        reader = _start_thread("requests", self._read)
        if self._loaded.num_threads == 1:
            self._run_work()
        else:
            for i in range(self._loaded.num_threads):
                _start_thread(f"call-{i}", self._run_work)
        reader.join()

    async def in_thread(self, number: int, work: Callable[[], Result]) -> Result:
        """Runs ``work``, which must not raise, in another thread, for the request with this number."""
        future: Future[Result] = Future()
        self._work.put((future, work))
        self._in_thread.add(number)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._in_thread.discard(number)

    def _run_work(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                future.set_result(work())

    def _run_loop(self) -> None:
        """Runs the event loop. If a call ends it by raising SystemExit, the process ends as well."""
        try:
            self._loop.run_forever()
        finally:
            os._exit(1)

    def _watch(self, loop: threading.Thread) -> None:
        """Prints where the event loop is blocked, once each time that it blocks."""
        while True:
            answers = threading.Event()
            self._loop.call_soon_threadsafe(answers.set)
            if not answers.wait(_BLOCKED_SECONDS):
                frame = sys._current_frames().get(loop.ident or 0)
                print(
                    f"{self._loaded.what} has blocked its event loop for {_BLOCKED_SECONDS:g} s, and with "
                    "it everything that its process runs. Await instead, or call what blocks with "
                    "asyncio.to_thread. It is here:",
                    *traceback.format_stack(frame) if frame is not None else [],
                    sep="\n",
                    file=sys.stderr,
                    flush=True,
                )
                answers.wait()  # or until the process is killed
            time.sleep(_LOOK_SECONDS)

    def _read(self) -> None:
        try:
            while (received := self._channel.read()) is not None:
                self._loop.call_soon_threadsafe(self._begin, *received)
        finally:
            self._work.put(None)

    def _begin(self, call: int, request: Any) -> None:
        if isinstance(request, Cancel):
            task = self._loop.create_task(self._cancel(call, request.number))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
        else:
            number = request.number
            self._calls[number] = task = self._loop.create_task(self._answer(call, request))
            task.add_done_callback(lambda _: self._calls.pop(number))

    async def _answer(self, call: int, request: Any) -> None:
        try:
            reply = await self._loaded.answer(self, request)
        except asyncio.CancelledError:
            return
        except BaseException as error:  # the user's code may raise anything
            traceback.print_exc(file=sys.stderr)
            line = user_line(error, self._loaded.function)
            reply = refused(failure_kind(error), describe_error(error) + line)
        try:
            self._channel.reply(call, reply)
        except NotPlainData as error:  # half of a pair in the name of a metric, for example
            message = f"What {self._loaded.what} returned or logged cannot be sent: {error}"
            self._channel.reply(call, refused("bad reward", message))

    async def _cancel(self, call: int, number: int) -> None:
        """Cancels a call. Replies at once if it runs in a thread, and otherwise when it has been cancelled."""
        task, hangs = self._calls.get(number), number in self._in_thread
        if task is not None:
            task.cancel()
            if not hangs:
                await asyncio.wait([task])
        self._channel.reply(call, Cancelled(hangs))


def _start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
