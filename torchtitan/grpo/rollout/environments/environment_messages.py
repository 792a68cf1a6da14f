# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What an environment worker and its pool say to each other: length-prefixed msgpack."""

from typing import Any

import msgspec

from torchtitan.grpo.rewards.scoring_messages import LENGTH

__all__ = ["LENGTH"]


class Load(msgspec.Struct, tag=True):
    """The first request: find the factory, and make one environment to look at."""

    factory: str
    options: dict[str, Any]


class Reset(msgspec.Struct, tag=True):
    """Make an environment, and begin its episode."""

    episode: int
    index: int
    text: Any
    token_ids: list[int]
    columns: dict[str, Any]


class Step(msgspec.Struct, tag=True):
    """A turn, to be observed."""

    episode: int
    text: str
    token_ids: list[int]


class CutOff(msgspec.Struct, tag=True):
    """The episode ends without being done."""

    episode: int


class Close(msgspec.Struct, tag=True):
    """The last request of an episode."""

    episode: int


class Loaded(msgspec.Struct, tag=True):
    """The factory was found."""

    stop_strings: list[str]


class Ended(msgspec.Struct, tag=True):
    """Answer to :class:`Reset`, :class:`CutOff` and :class:`Close`."""

    episode: int
    reward: float | None = None


class Observed(msgspec.Struct, tag=True):
    """Answer to :class:`Step`; see ``protocol.Observation``."""

    episode: int
    text: str | None
    token_ids: list[int] | None
    messages: list[dict[str, Any]] | None
    is_done: bool
    reward: float | None
    has_special_tokens: bool


class Refused(msgspec.Struct, tag=True):
    """The request failed; ``kind`` is the same for the same cause. Of no episode where -1."""

    episode: int
    kind: str
    message: str


EpisodeRequest = Reset | Step | CutOff | Close
Request = Load | EpisodeRequest
Reply = Loaded | Ended | Observed | Refused

_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Request | Reply) -> bytes:
    """A message with its length before it.

    Raises:
        TypeError: It holds something that is not plain data.
    """
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
