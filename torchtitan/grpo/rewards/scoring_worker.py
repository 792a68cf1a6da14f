# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A process that imports reward functions and calls them, one request after the other.

It is killed when a function hangs, so nothing but the function's own state lives here.
Whatever a function prints goes to the log: the channel is moved away from stdin and
stdout before any user code runs.
"""

import math
import os
import sys
import traceback
from typing import Any, BinaryIO

from torchtitan.grpo.rewards.reward_loading import RewardFunction, call_function, load_function
from torchtitan.grpo.rewards.scoring_messages import (
    LENGTH,
    Load,
    Loaded,
    Refused,
    Reply,
    Score,
    Scored,
    Values,
    decode_request,
    frame,
)

_LARGEST = 1e12
_MESSAGE_CHARS = 2000


class BadReward(Exception):
    """A reward function returned what cannot be trained on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    """Serves requests until the pool closes the channel."""
    requests, replies = claim_channel()
    paths: list[str] = []
    functions: list[RewardFunction] = []
    while (body := read_frame(requests)) is not None:
        request = decode_request(body)
        if isinstance(request, Load):
            paths = request.functions
            reply = _load(paths, functions)
        else:
            reply = _score(request, paths, functions)
        replies.write(frame(reply))
        replies.flush()


def claim_channel() -> tuple[BinaryIO, BinaryIO]:
    """Moves stdin and stdout away from user code: requests in, replies out."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def read_frame(requests: BinaryIO) -> bytes | None:
    """The next message's body; None where the channel was closed."""
    header = requests.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return requests.read(LENGTH.unpack(header)[0])


def _load(paths: list[str], functions: list[RewardFunction]) -> Reply:
    try:
        functions[:] = [load_function(path) for path in paths]
    except ValueError as error:
        return Refused("load", str(error))
    return Loaded()


def _score(request: Score, paths: list[str], functions: list[RewardFunction]) -> Reply:
    values: list[Values] = []
    for position in request.which:
        path = paths[position]
        try:
            values.append(_call(functions[position], path, request))
        except BadReward as error:
            return Refused(error.kind, str(error))
        except Exception as error:  # the user's function may raise anything
            traceback.print_exc(file=sys.stderr)
            return Refused(
                f"{path} raised {type(error).__name__}",
                f"Reward function {path!r} raised {type(error).__name__}: "
                f"{str(error)[:_MESSAGE_CHARS]}",
            )
    return Scored(values)


def _call(function: RewardFunction, path: str, request: Score) -> Values:
    result = call_function(
        function, request.prompts, request.completions, request.completion_ids, request.columns
    )
    expected = len(request.completions)
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise BadReward(
            f"{path} type",
            f"Reward function {path!r} must return a list of {expected} numbers, "
            f"got a {type(result).__name__}.",
        )
    if len(result) != expected:
        raise BadReward(
            f"{path} count",
            f"Reward function {path!r} must return one number for each of {expected} completions, "
            f"got {len(result)}.",
        )
    return [_number(value, path) for value in result]


def _number(value: Any, path: str) -> float | None:
    if value is None:
        return None
    # Numpy's and torch's scalars are numbers here; strings are not.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadReward(
            f"{path} type",
            f"Reward function {path!r} must return numbers (or None), got {value!r:.100} "
            f"of type {type(value).__name__}.",
        )
    number = float(value)
    if not math.isfinite(number):
        raise BadReward(
            f"{path} not finite",
            f"Reward function {path!r} must return finite numbers, got {value}.",
        )
    if abs(number) > _LARGEST:
        # Squared and summed over groups, they must still be finite in float32.
        raise BadReward(
            f"{path} too large",
            f"Reward function {path!r} must return numbers of at most {_LARGEST:g} in size, "
            f"got {number:g}.",
        )
    return number


if __name__ == "__main__":
    main()
