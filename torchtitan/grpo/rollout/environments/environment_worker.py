# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process in which environments run. Each episode has its own thread and event loop.

A step that blocks therefore delays only its own episode. If a call exceeds the time limit, the pool
abandons the episode, and the hanging thread ends with this process.
"""

import asyncio
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from torchtitan.grpo.functions import describe_error
from torchtitan.grpo.rollout.environments.environment_loading import (
    check_environment,
    load_factory,
)
from torchtitan.grpo.rollout.environments.environment_messages import (
    Close,
    CutOff,
    Done,
    EnvironmentLoaded,
    EpisodeRequest,
    LoadEnvironment,
    Observed,
    Reply,
    Request,
    Reset,
    Step,
    decode_request,
)
from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.frames import NotPlainData, Refused, refused
from torchtitan.grpo.workers.worker_channel import WorkerChannel

# A longer text must be a mistake, because it would exceed any context many times over.
_MAX_CHARACTERS = 4_000_000


class BadObservation(Exception):
    """Raised if an environment returned an observation that cannot be added to a context."""


class _EpisodeThread:
    """Runs one episode on a thread of its own.

    Requests arrive one at a time and are answered in order.
    """

    def __init__(
        self, episode: int, factory: Callable[[], Any], channel: WorkerChannel[Request]
    ) -> None:
        self._factory, self._channel = factory, channel
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.Queue[tuple[int, EpisodeRequest]] = asyncio.Queue()
        name = f"environment-{episode}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: int, request: EpisodeRequest) -> None:
        """Passes a request to the episode's thread, which answers it."""
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
                self._channel.reply(call, _refused("bad observation", error))
            if isinstance(request, Close):
                return

    async def _answer(self, request: EpisodeRequest) -> Reply | Refused:
        try:
            match request:
                case Reset():
                    self._environment = self._factory()
                    await self._environment.reset(_prompt(request))
                case Step():
                    observation = await self._environment.step(request.text, request.token_ids)
                    return _observed(observation)
                case CutOff():
                    cut_off = getattr(self._environment, "cut_off", None)
                    reward = await cut_off() if cut_off is not None else None
                    return Done(_number(reward))
                case Close():
                    if self._environment is not None:
                        await self._environment.close()
        except BadObservation as error:
            return _refused("bad observation", error)
        except BaseException as error:  # the user's environment may raise anything
            traceback.print_exc(file=sys.stderr)
            return _refused(f"raised {type(error).__name__}", error)
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
        factory = load_factory(request.factory, request.options)
        stop_strings = check_environment(factory(), request.factory)
    except Exception as error:  # the user's factory may raise anything
        if not isinstance(error, ValueError):
            traceback.print_exc(file=sys.stderr)
        text = describe_error(error)
        if isinstance(error, ValueError):  # its text says what to do
            text = text.removeprefix(f"{type(error).__name__}: ")
        channel.reply(call, refused("load", text))
        return None
    channel.reply(call, EnvironmentLoaded(stop_strings))
    return factory


def _refused(kind: str, error: BaseException) -> Refused:
    return refused(kind, describe_error(error))


def _prompt(request: Reset) -> Prompt:
    ids = np.array(request.token_ids, np.int32)
    return Prompt(request.index, request.text, ids, request.columns)


def _observed(observation: Any) -> Observed:
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
    return Observed(
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
