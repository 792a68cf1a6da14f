# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Messages between a scoring worker and its pool; see `workers.frames` for how they travel."""

from typing import Any

import msgspec

from torchtitan.grpo.workers.frames import Refused

Values = list[float | None]
"""One value for each completion; ``None`` if the function does not apply to the completion."""


class LoadFunctions(msgspec.Struct, tag=True):
    """Requests that the worker imports reward functions. This is the first request."""

    functions: list[str]


class Score(msgspec.Struct, tag=True):
    """Score the completions of one prompt.

    ``prompts``, ``completions``, ``completion_ids`` and each column have the same length.

    Attributes:
        which: Functions to call, as positions in the list of :class:`LoadFunctions`.
    """

    which: list[int]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class FunctionsLoaded(msgspec.Struct, tag=True):
    """Replies to :class:`LoadFunctions` that all functions are imported."""


class Scored(msgspec.Struct, tag=True):
    """Replies to :class:`Score` with the values.

    Attributes:
        values: ``values[i]`` is what function ``which[i]`` returned.
    """

    values: list[Values]


Request = LoadFunctions | Score
Reply = FunctionsLoaded | Scored

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Refused).decode
