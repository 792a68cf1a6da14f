# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that imports reward functions and scores groups with them, side by side.

The pool may kill it at any time, so it keeps no state but that of the functions themselves. These
are its threads::

    requests      reads the pipe
    scoring       the event loop that awaits async functions and sends the replies
    main thread   runs synchronous functions one by one, where signals and asyncio.run work
    reward-N      run synchronous functions if several groups are scored at a time
"""

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from torchtitan.grpo.config.judge import Judge as Settings
from torchtitan.grpo.rewards.builtin import QUICK
from torchtitan.grpo.rewards.reward_calls import LoadedFunction, Postponed, Score, Values
from torchtitan.grpo.rewards.reward_loading import RewardFunction, load_function
from torchtitan.grpo.rewards.reward_log import RewardLog
from torchtitan.grpo.workers.channel import NotPlainData, Refused, WorkerChannel, refused

ASYNC_CONCURRENCY = 64
"""Groups that one worker scores at a time, by default, if no function blocks."""


class LoadFunctions(msgspec.Struct, tag=True):
    """Asks for the import of reward functions. This is the first request."""

    functions: list[str]
    concurrency: int  # reward.concurrency
    timeout_seconds: float  # reward.timeout_seconds
    judge: Settings


class Loaded(msgspec.Struct, tag=True):
    """Reply to :class:`LoadFunctions`: how many groups may be scored at a time.

    A ``warning`` says why, if the user may expect more of them.
    """

    concurrency: int
    warning: str


class Scored(msgspec.Struct, tag=True):
    """Reply to :class:`Score`: ``values[i]`` is what function ``which[i]`` returned.

    The functions have logged ``metrics``, and ``extra`` with one value for each completion. What the
    policy wrote is why the completions ``unscorable`` have no value.
    """

    values: list[Values]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]
    unscorable: list[int] = []


class Cancel(msgspec.Struct, tag=True):
    """Asks a worker to end the scoring of a group, whose request is then not answered."""

    group: int


class Cancelled(msgspec.Struct, tag=True):
    """Reply to :class:`Cancel`. A synchronous function that ``hangs`` cannot be ended."""

    hangs: bool


Reply = Loaded | Scored | Postponed | Cancelled
decode_request = msgspec.msgpack.Decoder(LoadFunctions | Score | Cancel).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Refused).decode

_Channel = WorkerChannel[LoadFunctions | Score | Cancel]
_Result = Values | Refused
_Call = tuple[Future[_Result], Callable[[], _Result]]


@dataclass
class _Group:
    task: asyncio.Task[None]
    in_thread: bool = False  # a synchronous function is running


class _Scoring:
    """Scores groups on an event loop, and calls what may block in other threads."""

    def __init__(self, channel: _Channel, functions: list[LoadedFunction]) -> None:
        self._channel, self._functions = channel, functions
        self._loop = asyncio.new_event_loop()
        self._groups: dict[int, _Group] = {}
        self._cancelling: set[asyncio.Task[None]] = set()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    def run(self, concurrency: int) -> None:
        """Scores up to ``concurrency`` groups at a time until the pool closes the channel."""
        _start_thread("scoring", self._loop.run_forever)
        reader = _start_thread("requests", self._read)
        if concurrency == 1:
            self._run_calls()
        elif not all(function.is_async for function in self._functions):
            for i in range(concurrency):
                _start_thread(f"reward-{i}", self._run_calls)
        reader.join()

    def _run_calls(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                future.set_result(call())

    def _read(self) -> None:
        try:
            while (received := self._channel.read()) is not None:
                self._loop.call_soon_threadsafe(self._begin, *received)
        finally:
            self._calls.put(None)

    def _begin(self, call: int, request: LoadFunctions | Score | Cancel) -> None:
        if isinstance(request, Cancel):
            task = self._loop.create_task(self._cancel(call, request.group))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
        elif isinstance(request, Score):
            task = self._loop.create_task(self._score(call, request))
            self._groups[request.group] = _Group(task)

    async def _score(self, call: int, request: Score) -> None:
        try:
            self._channel.reply(call, await self._values(self._groups[request.group], request))
        except NotPlainData as error:  # half of a pair in the name of a metric, for example
            self._channel.reply(call, refused("log", f"What was logged cannot be sent: {error}"))
        finally:
            del self._groups[request.group]

    async def _values(self, group: _Group, request: Score) -> Scored | Refused:
        """Calls synchronous functions one after the other, and then awaits all others together."""
        found: dict[int, _Result] = {}
        functions = {i: self._functions[i] for i in request.which}
        log = RewardLog(len(request.completions))
        for i, function in functions.items():
            if not function.is_async:
                found[i] = result = await self._in_thread(
                    group, functools.partial(function.call, request, log)
                )
                if isinstance(result, Refused):
                    return result
        awaited = [i for i, function in functions.items() if function.is_async]
        results = await asyncio.gather(*(functions[i].await_values(request, log) for i in awaited))
        found |= zip(awaited, results, strict=True)
        values: list[Values] = []
        for i in request.which:
            result = found[i]
            if isinstance(result, Refused):
                return result
            values.append(result)
        return Scored(values, log.metrics, log.extra, sorted(log.unscorable))

    async def _in_thread(self, group: _Group, call: Callable[[], _Result]) -> _Result:
        future: Future[_Result] = Future()
        self._calls.put((future, call))
        group.in_thread = True
        try:
            return await asyncio.wrap_future(future)
        finally:
            group.in_thread = False

    async def _cancel(self, call: int, number: int) -> None:
        """Answers at once about a thread; a function that ignores this is not answered for."""
        hangs, group = False, self._groups.get(number)
        if group is not None:
            hangs = group.in_thread
            group.task.cancel()
            if not hangs:
                await asyncio.wait([group.task])
        self._channel.reply(call, Cancelled(hangs))


def main() -> None:
    channel: _Channel = WorkerChannel(decode_request)
    received = channel.read()
    if received is None:
        return
    call, request = received
    assert isinstance(request, LoadFunctions), "the first request loads the functions"
    loading = request
    try:
        functions = [
            LoadedFunction(path, load_function(path, lambda: _judge(loading)))
            for path in request.functions
        ]
    except ValueError as error:
        channel.reply(call, refused("load", str(error)))
        return
    blocking, default = default_concurrency(functions)
    concurrency = request.concurrency or default
    warning = ""
    if blocking and not request.concurrency and any(f.is_async for f in functions):
        warning = (
            "Each reward worker scores one group at a time, because of functions that are not async def "
            f"({', '.join(blocking)}). Set reward.concurrency to score several side by side."
        )
    channel.reply(call, Loaded(concurrency, warning))
    _Scoring(channel, functions).run(concurrency)


def default_concurrency(functions: Iterable[LoadedFunction]) -> tuple[list[str], int]:
    """Returns the functions that block, and how many groups a worker therefore scores at a time."""
    blocking = [f.path for f in functions if not (f.is_async or f.path in QUICK)]
    return blocking, 1 if blocking else ASYNC_CONCURRENCY


def _judge(request: LoadFunctions) -> RewardFunction:
    from torchtitan.grpo.rewards.judge import Judge  # imports aiohttp, which most runs do not need

    return Judge(request.judge, request.timeout_seconds)


def _start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    main()
