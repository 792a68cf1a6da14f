# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a reward worker and its pool say to each other: length-prefixed msgpack."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")

Values = list[float | None]
"""One value a completion; None where the function does not apply to it."""


class Load(msgspec.Struct, tag=True):
    """The first request: import these functions."""

    functions: list[str]


class Score(msgspec.Struct, tag=True):
    """Score the completions of one prompt.

    ``which`` are the positions in :class:`Load`'s list of the functions to call;
    ``prompts``, ``completions``, ``completion_ids`` and each column are equally long.
    """

    which: list[int]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class Loaded(msgspec.Struct, tag=True):
    """All functions are imported."""


class Scored(msgspec.Struct, tag=True):
    """``values[i]`` is what function ``which[i]`` gave."""

    values: list[Values]


class Refused(msgspec.Struct, tag=True):
    """The request failed; ``kind`` is the same for failures of the same cause."""

    kind: str
    message: str


Request = Load | Score
Reply = Loaded | Scored | Refused

_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Request | Reply) -> bytes:
    """A message with its length before it.

    Raises:
        TypeError: A column holds something that is not plain data.
    """
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
