# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Calls one reward function for one group, and turns what it returns or raises into a reply.

No exception of user code leaves these functions, because some exceptions would end the event loop,
and others cannot be stored in futures.
"""

import asyncio
import functools
import inspect
import math
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import msgspec

from torchtitan.grpo.rewards import ScoreLater
from torchtitan.grpo.rewards.reward_loading import (
    RewardFunction,
    RewardLog,
    TrainerState,
    call_function,
    foreign_signature,
    missing_arguments,
)
from torchtitan.grpo.system.functions import code_holder, describe_error, user_line
from torchtitan.grpo.workers.channel import Refused, refused

# Rewards are squared and summed over groups, and the result must be finite in float32.
LARGEST_REWARD = 1e12

Values = list[float | None]
"""One value for each completion; ``None`` if the function does not apply to the completion."""


class Score(msgspec.Struct, tag=True):
    """Asks a worker to score one prompt's completions with the functions whose indices are ``which``.

    ``number`` identifies the request within its pool.
    """

    number: int
    which: list[int]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    global_step: int
    max_steps: int
    row: str = ""  # of the data, for logs


class Postponed(Refused, tag=True):
    """Reply to a request in which a function raised :class:`ScoreLater`."""


class _BadReward(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function with the path by which it is named in the configuration."""

    path: str
    function: RewardFunction

    @functools.cached_property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(code_holder(self.function))

    def call(self, request: Score, log: RewardLog) -> Values | Refused:
        """Calls a synchronous function in the current thread."""
        try:
            return _checked(self._start(request, log), len(request.completions))
        except BaseException as error:
            return self._refused(error, request)

    async def await_values(self, request: Score, log: RewardLog) -> Values | Refused:
        """Awaits an asynchronous function."""
        try:
            return _checked(await self._start(request, log), len(request.completions))
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return self._refused(error, request)

    def _start(self, request: Score, log: RewardLog) -> Any:
        missing = missing_arguments(self.function, request.columns)
        if missing:
            remedy = (
                foreign_signature(self.function, missing)
                or f'Rename one with prompts.rename = {{ column = "{missing[0]}" }}, or give the '
                "argument a default."
            )
            raise _BadReward(
                "argument",
                f"needs the argument {missing[0]!r}, which is no column of the prompts. Their columns are "
                f"{sorted(request.columns)}. {remedy}",
            )
        return call_function(
            self.function,
            request.prompts,
            request.completions,
            request.completion_ids,
            request.columns,
            {
                "trainer_state": TrainerState(request.global_step, request.max_steps),
                "log_extra": log.log_extra,
                "log_metric": log.log_metric,
                "log_unscorable": log.log_unscorable,
            },
        )

    def _refused(self, error: BaseException, request: Score) -> Refused:
        subject = f"Reward function {self.path!r}"
        if isinstance(error, _BadReward):
            return refused(f"{self.path} {error.kind}", f"{subject} {error}")
        if isinstance(error, ScoreLater):
            return refused("postponed", f"{subject} cannot be computed now: {error}", Postponed)
        shown = ascii(request.completions)[:4000]
        print(f"{request.row}: {subject} raised for the completions {shown}", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
        return refused(
            f"{self.path} raised {type(error).__name__}",
            f"{subject} raised {describe_error(error)}{user_line(error, self.function)}",
        )


def _checked(result: Any, expected: int) -> Values:
    problem = _shape_problem(result, expected)
    if problem is not None:
        raise _BadReward("type", f"must return a list of {expected} numbers, got {problem}")
    if len(result) != expected:
        raise _BadReward(
            "count",
            f"must return one number for each of {expected} completions, got {len(result)}.",
        )
    return [_number(value) for value in result]


def _shape_problem(result: Any, expected: int) -> str | None:
    """Returns what a function gave instead of a flat list, and what to do, or ``None`` if it gave one."""
    what = f"a {type(result).__name__}"
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()  # else Python warns that nobody has awaited it
        return (
            f"{what}. Only a function that is defined with async def itself, or an object whose "
            "__call__ is, is awaited."
        )
    if result is None:
        return "None. Is a return statement missing?"
    if inspect.isgenerator(result) or isinstance(result, set | frozenset | map | filter | zip):
        return f"{what}. Return a list."
    shape = getattr(result, "shape", None)
    if shape is not None and len(shape) != 1:
        flat = " Return its .reshape(-1)." if math.prod(shape) == expected else ""
        return f"{what} of shape {tuple(shape)}, not ({expected},).{flat}"
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        return f"{what}."
    for value in result:
        if isinstance(value, list | tuple) or len(getattr(value, "shape", ())) > 0:
            return f"{what} that holds {value!r:.100}, a {type(value).__name__}: one number each."
    return None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    # Scalars of numpy and torch are accepted as numbers; strings are not.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _BadReward(
            "type",
            f"must return numbers (or None), got {value!r:.100} of type {type(value).__name__}.",
        )
    number = float(value)
    if not math.isfinite(number):
        raise _BadReward("not finite", f"must return finite numbers, got {value}.")
    if abs(number) > LARGEST_REWARD:
        raise _BadReward(
            "too large",
            f"must return numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, got {number:g}.",
        )
    return number
