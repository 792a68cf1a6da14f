# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process in which environments run. Each episode has its own thread and event loop.

A step that blocks delays only its own episode, and a thread that hangs ends with this process.
"""

import asyncio
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.system.functions import describe_error, failure_kind, load_function, user_line
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, WorkerChannel, refused

# A longer text must be a mistake, because it would exceed any context many times over.
_MAX_CHARACTERS = 4_000_000

_WHAT = "rollout.environment: environment"
_MODULE = "torchtitan.grpo.rollout.environments"
BUILTIN = {
    "calculator": f"{_MODULE}.calculator:Calculator",
    "verifiers": f"{_MODULE}.verifiers:VerifiersEnvironment",
}


class LoadEnvironment(msgspec.Struct, tag=True):
    factory: str
    options: dict[str, Any]


class Reset(msgspec.Struct, tag=True):
    episode: int
    index: int
    text: Any
    token_ids: list[int]
    columns: dict[str, Any]


class Step(msgspec.Struct, tag=True):
    episode: int
    text: str
    token_ids: list[int]


class CutOff(msgspec.Struct, tag=True):
    episode: int


class Close(msgspec.Struct, tag=True):
    episode: int


class EnvironmentLoaded(msgspec.Struct, tag=True):
    stop_strings: list[str]


class Done(msgspec.Struct, tag=True):
    """Reply to :class:`Reset`, :class:`CutOff` and :class:`Close`."""

    reward: float | None = None


class Observed(msgspec.Struct, tag=True):
    """Reply to :class:`Step`."""

    observation: Observation


EpisodeRequest = Reset | Step | CutOff | Close
Request = LoadEnvironment | EpisodeRequest
Reply = EnvironmentLoaded | Done | Observed

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Refused).decode


class BadObservation(Exception):
    """An observation cannot be added to a context."""


class _EpisodeThread:
    """Runs one episode on its own thread. Requests arrive one at a time, and are answered in order."""

    def __init__(
        self, episode: int, factory: Callable[[], Any], channel: WorkerChannel[Request]
    ) -> None:
        self._factory, self._channel = factory, channel
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.Queue[tuple[int, EpisodeRequest]] = asyncio.Queue()
        name = f"environment-{episode}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, call: int, request: EpisodeRequest) -> None:
        self._loop.call_soon_threadsafe(self._requests.put_nowait, (call, request))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        while True:
            call, request = await self._requests.get()
            reply = await self._answer(request)
            try:
                self._channel.reply(call, reply)
            except NotPlainData as error:
                self._channel.reply(call, refused("bad observation", describe_error(error)))
            if isinstance(request, Close):
                return

    async def _answer(self, request: EpisodeRequest) -> Reply | Refused:
        try:
            match request:
                case Reset():
                    ids = np.array(request.token_ids, np.int32)
                    self._environment = self._factory()
                    await self._environment.reset(
                        Prompt(request.index, request.text, ids, request.columns)
                    )
                case Step():
                    found = await self._environment.step(request.text, request.token_ids)
                    return Observed(_checked(found))
                case CutOff():
                    cut_off = getattr(self._environment, "cut_off", None)
                    reward = await cut_off() if cut_off is not None else None
                    return Done(_number(reward))
                case Close():
                    if self._environment is not None:
                        await self._environment.close()
        except BadObservation as error:
            return refused("bad observation", describe_error(error))
        except BaseException as error:  # the user's environment may raise anything
            traceback.print_exc(file=sys.stderr)
            return refused(failure_kind(error), describe_error(error) + user_line(error))
        return Done()


def main() -> None:
    """Serves requests until the pool closes the channel."""
    channel = WorkerChannel(decode_request)
    factory: Callable[[], Any] | None = None
    episodes: dict[int, _EpisodeThread] = {}
    while (received := channel.read()) is not None:
        call, request = received
        if isinstance(request, LoadEnvironment):
            factory = _load(call, request, channel)
            continue
        if isinstance(request, Reset):
            assert factory is not None, "the first request loads the factory"
            episodes[request.episode] = _EpisodeThread(request.episode, factory, channel)
        episodes[request.episode].put(call, request)
        if isinstance(request, Close):
            del episodes[request.episode]


def _load(
    call: int, request: LoadEnvironment, channel: WorkerChannel[Request]
) -> Callable[[], Any] | None:
    try:
        factory = _find_factory(request.factory, request.options)
        stop_strings = _check_environment(factory(), request.factory)
    except ValueError as error:  # its text says what to do
        channel.reply(call, refused("load", describe_error(error).partition(": ")[2]))
        return None
    except Exception as error:  # the user's factory may raise anything
        traceback.print_exc(file=sys.stderr)
        channel.reply(call, refused("load", describe_error(error) + user_line(error)))
        return None
    channel.reply(call, EnvironmentLoaded(stop_strings))
    return factory


def _find_factory(path: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    factory = load_function(BUILTIN.get(path, path), _WHAT, BUILTIN)
    try:
        inspect.signature(factory).bind(**options)
    except ValueError:  # some callables that are written in C have no signature
        pass
    except TypeError as error:
        raise ValueError(
            f"{_WHAT} {path!r} does not take rollout.environment_options = {dict(options)}: {error}."
        ) from error
    return lambda: factory(**options)


def _check_environment(environment: Any, path: str) -> list[str]:
    """Returns the stop strings of an object that a factory has made."""
    for name in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, name, None)):
            raise ValueError(
                f"{_WHAT} {path!r} must make objects with async methods reset, step and close, "
                f"got a {type(environment).__name__} whose {name} is not an async method."
            )
    stop_strings = getattr(environment, "stop_strings", ())
    if isinstance(stop_strings, str) or not all(isinstance(s, str) and s for s in stop_strings):
        raise ValueError(
            f"{_WHAT} {path!r}: stop_strings must be a list of strings, got {stop_strings!r}."
        )
    return list(stop_strings)


def _checked(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise BadObservation(f"step must return an Observation, got {observation!r:.100}")
    text, ids, messages = observation.text, observation.token_ids, observation.messages
    if sum(part is not None for part in (text, ids, messages)) > 1:
        raise BadObservation("at most one of text, token_ids and messages may be given")
    if text is not None and not (isinstance(text, str) and len(text) <= _MAX_CHARACTERS):
        raise BadObservation(f"text must be a string of at most {_MAX_CHARACTERS} characters")
    if ids is not None:
        ids = [int(token) for token in ids]
    if messages is not None and not (messages and all(isinstance(m, dict) for m in messages)):
        raise BadObservation(
            f"messages must be a list of one or more dictionaries, got {messages!r:.100}"
        )
    return Observation(
        text, ids, messages, bool(observation.is_done), _number(observation.reward),
        bool(observation.has_special_tokens),
    )  # fmt: skip


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, str | bytes) or not math.isfinite(number := float(reward)):
        raise BadObservation(f"reward must be a finite number or None, got {reward!r:.100}")
    return number


if __name__ == "__main__":
    main()
