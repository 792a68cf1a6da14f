# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that imports reward functions and calls them, one request after the other.

The pool may kill it at any time, so it keeps no state but that of the functions themselves.
"""

import inspect
import math
import sys
import traceback
from typing import Any

import msgspec

from torchtitan.grpo.functions import describe_error
from torchtitan.grpo.rewards.reward_loading import (
    RewardFunction,
    call_function,
    foreign_signature,
    load_function,
    missing_arguments,
)
from torchtitan.grpo.workers.channel import Refused, WorkerChannel, refused

# Rewards are squared and summed over groups, and the result must be finite in float32.
_LARGEST = 1e12

Values = list[float | None]
"""One value for each completion; ``None`` if the function does not apply to the completion."""


class LoadFunctions(msgspec.Struct, tag=True):
    """Asks for the import of reward functions. This is the first request."""

    functions: list[str]


class Score(msgspec.Struct, tag=True):
    """Asks a worker to score the completions of one prompt with the functions at these positions."""

    which: list[int]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class Scored(msgspec.Struct, tag=True):
    """Reply to both requests: ``values[i]`` is what function ``which[i]`` returned."""

    values: list[Values]


decode_request = msgspec.msgpack.Decoder(LoadFunctions | Score).decode
decode_reply = msgspec.msgpack.Decoder(Scored | Refused).decode


_Functions = list[tuple[str, RewardFunction]]


class BadReward(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    channel = WorkerChannel(decode_request)
    functions: _Functions = []
    while (received := channel.read()) is not None:
        call, request = received
        if isinstance(request, LoadFunctions):
            reply = _load(request.functions, functions)
        else:
            reply = _score(request, functions)
        channel.reply(call, reply)


def _load(paths: list[str], functions: _Functions) -> Scored | Refused:
    try:
        functions += [(path, load_function(path)) for path in paths]
    except ValueError as error:
        return refused("load", str(error))
    return Scored([])


def _score(request: Score, functions: _Functions) -> Scored | Refused:
    values: list[Values] = []
    for path, function in (functions[position] for position in request.which):
        try:
            values.append(_call(function, request))
        except BadReward as error:
            return refused(f"{path} {error.kind}", f"Reward function {path!r} {error}")
        except Exception as error:  # the user's function may raise anything
            traceback.print_exc(file=sys.stderr)
            return refused(
                f"{path} raised {type(error).__name__}",
                f"Reward function {path!r} raised {describe_error(error)}"
                f"{_user_line(error, function)}",
            )
    return Scored(values)


def _user_line(error: BaseException, function: RewardFunction) -> str:
    """The last line of a reward function's own file on the way to where it raised."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or frames)[-1]
    return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"


def _call(function: RewardFunction, request: Score) -> Values:
    missing = missing_arguments(function, request.columns)
    if missing:
        raise BadReward(
            "argument",
            f"needs the argument {missing[0]!r}, which is no column of the prompts. Their columns are "
            f"{sorted(request.columns)}. "
            + (
                foreign_signature(function, missing)
                or f'Rename one with prompts.rename = {{ column = "{missing[0]}" }}, or give the argument '
                "a default."
            ),
        )
    result = call_function(
        function, request.prompts, request.completions, request.completion_ids, request.columns
    )
    expected = len(request.completions)
    problem = _shape_problem(result, expected)
    if problem is not None:
        raise BadReward("type", f"must return a list of {expected} numbers, got {problem}")
    if len(result) != expected:
        raise BadReward(
            "count",
            f"must return one number for each of {expected} completions, got {len(result)}.",
        )
    return [_number(value) for value in result]


def _shape_problem(result: Any, expected: int) -> str | None:
    """Says what else than a list a function returned, and what to do; ``None`` for a list."""
    what = f"a {type(result).__name__}"
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()  # else Python warns that nobody has awaited it
        return (
            f"{what}. An async function is not awaited: define it with def, and call "
            "asyncio.run within it."
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
        raise BadReward(
            "type",
            f"must return numbers (or None), got {value!r:.100} of type {type(value).__name__}.",
        )
    number = float(value)
    if not math.isfinite(number):
        raise BadReward("not finite", f"must return finite numbers, got {value}.")
    if abs(number) > _LARGEST:
        raise BadReward(
            "too large",
            f"must return numbers between -{_LARGEST:g} and {_LARGEST:g}, got {number:g}.",
        )
    return number


if __name__ == "__main__":
    main()
