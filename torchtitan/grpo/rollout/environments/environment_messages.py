# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Messages between an environment worker and its pool; see `workers.frames`."""

from typing import Any

import msgspec

from torchtitan.grpo.workers.frames import Refused


class LoadEnvironment(msgspec.Struct, tag=True):
    """Requests that the worker finds the factory and checks one environment that it makes.

    This is the first request.
    """

    factory: str
    options: dict[str, Any]


class Reset(msgspec.Struct, tag=True):
    """Requests that the worker makes an environment and begins its episode."""

    episode: int
    index: int
    text: Any
    token_ids: list[int]
    columns: dict[str, Any]


class Step(msgspec.Struct, tag=True):
    """Requests that the environment reads a turn of the model and returns its observation."""

    episode: int
    text: str
    token_ids: list[int]


class CutOff(msgspec.Struct, tag=True):
    """Requests the end of an episode that the environment itself has not ended."""

    episode: int


class Close(msgspec.Struct, tag=True):
    """Requests that the environment is released. This is the last request of an episode."""

    episode: int


class EnvironmentLoaded(msgspec.Struct, tag=True):
    """Replies to :class:`LoadEnvironment` that the factory was found."""

    stop_strings: list[str]


class Done(msgspec.Struct, tag=True):
    """Replies to :class:`Reset`, :class:`CutOff` and :class:`Close`."""

    reward: float | None = None


class Observed(msgspec.Struct, tag=True):
    """Replies to :class:`Step`; see ``protocol.Observation``."""

    text: str | None
    token_ids: list[int] | None
    messages: list[dict[str, Any]] | None
    is_done: bool
    reward: float | None
    has_special_tokens: bool


EpisodeRequest = Reset | Step | CutOff | Close
Request = LoadEnvironment | EpisodeRequest
Reply = EnvironmentLoaded | Done | Observed

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Refused).decode
