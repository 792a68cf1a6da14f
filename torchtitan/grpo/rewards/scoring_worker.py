# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that imports reward functions and scores groups with them, side by side; see `host`.

It keeps no state but that of the functions themselves.
"""

import asyncio
import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from torchtitan.grpo.config.judge import Judge as Settings
from torchtitan.grpo.rewards.builtin import QUICK
from torchtitan.grpo.rewards.reward_calls import LoadedFunction, Postponed, Score, Values
from torchtitan.grpo.rewards.reward_loading import RewardFunction, RewardLog, load_function
from torchtitan.grpo.system import spans
from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.host import Cancel, Cancelled, Host, serve
from torchtitan.grpo.workers.host import Loaded as Hosted

ASYNC_CONCURRENCY = 64
"""Groups that one worker scores at a time, by default, if no function blocks."""


class LoadFunctions(msgspec.Struct, tag=True):
    """The first request to a worker, which asks it to import the reward functions."""

    functions: list[str]
    concurrency: int  # reward.concurrency
    timeout_seconds: float  # reward.timeout_seconds
    judge: Settings


class Loaded(msgspec.Struct, tag=True):
    """Reply to :class:`LoadFunctions`: how many groups may be scored at a time (``concurrency``).

    If the user may expect a higher number, ``warning`` explains it.
    """

    concurrency: int
    warning: str


class Scored(msgspec.Struct, tag=True):
    """Reply to :class:`Score`: ``values[i]`` is what function ``which[i]`` returned.

    ``metrics`` and ``extra`` are what the functions logged; ``extra`` has one value for each completion.
    ``unscorable`` are the completions without a value because of what the policy wrote in them.
    """

    values: list[Values]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]
    unscorable: list[int] = []


Reply = Loaded | Scored | Postponed | Cancelled
decode_request = msgspec.msgpack.Decoder(LoadFunctions | Score | Cancel).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Refused).decode


def load(request: LoadFunctions) -> Hosted:
    """Loads the functions. Raises ValueError if one cannot be loaded."""
    functions = [
        LoadedFunction(path, load_function(path, lambda: _judge(request)))
        for path in request.functions
    ]
    blocking, default = default_concurrency(functions)
    concurrency = request.concurrency or default
    warning = ""
    if blocking and not request.concurrency and any(f.is_async for f in functions):
        warning = (
            "Each reward worker scores one group at a time, because of functions that are not async def "
            f"({', '.join(blocking)}). Set reward.concurrency to score several side by side."
        )
    calls_block = concurrency == 1 or not all(function.is_async for function in functions)
    return Hosted(
        f"One of the reward functions {', '.join(request.functions)}",
        Loaded(concurrency, warning),
        functools.partial(_answer, functions),
        concurrency if calls_block else 0,
    )


async def _answer(loaded: list[LoadedFunction], host: Host, request: Score) -> Scored | Refused:
    """Scores a group: calls synchronous functions one by one, and then awaits all others together."""
    found: dict[int, Values | Refused] = {}
    functions = {i: loaded[i] for i in request.which}
    log = RewardLog(len(request.completions))
    for i, function in functions.items():
        if not function.is_async:
            call = functools.partial(function.call, request, log)
            with spans.span("functions", function.path):
                found[i] = result = await host.in_thread(request.number, call)
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


def default_concurrency(functions: Iterable[LoadedFunction]) -> tuple[list[str], int]:
    """Returns which functions block the worker, and how many groups it scores at a time by default."""
    blocking = [f.path for f in functions if not (f.is_async or f.path in QUICK)]
    return blocking, 1 if blocking else ASYNC_CONCURRENCY


def _judge(request: LoadFunctions) -> RewardFunction:
    from torchtitan.grpo.rewards.judge import Judge  # imports aiohttp, which most runs do not need

    return Judge(request.judge, request.timeout_seconds)


if __name__ == "__main__":
    spans.open_inherited("reward worker")
    serve(decode_request, load)
