# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A process in which environments run: an event loop and a thread for each episode.

So a step that blocks holds up its own episode alone; one that hangs is given up by the pool,
and ends with this process. Whatever an environment prints goes to the log.
"""

import asyncio
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from torchtitan.grpo.rewards.scoring_worker import claim_channel, read_frame
from torchtitan.grpo.rollout.environments.environment_loading import check_environment, load_factory
from torchtitan.grpo.rollout.environments.environment_messages import (
    Close,
    CutOff,
    Ended,
    EpisodeRequest,
    Load,
    Loaded,
    Observed,
    Refused,
    Reply,
    Reset,
    Step,
    decode_request,
    frame,
)
from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.types import Prompt

# Longer ones are an accident: they would fill the context many times over.
_MAX_CHARACTERS = 4_000_000


class BadObservation(Exception):
    """An environment answered what cannot be put into a context."""


class _Replies:
    """The channel back, which episodes share."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, reply: Reply) -> None:
        framed = frame(reply)
        with self._lock:
            self._stream.write(framed)
            self._stream.flush()


class _EpisodeThread:
    """One episode: requests come in one at a time, and are answered in order."""

    def __init__(self, episode: int, factory: Callable[[], Any], replies: _Replies) -> None:
        self._episode, self._factory, self._replies = episode, factory, replies
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.Queue[EpisodeRequest] = asyncio.Queue()
        name = f"environment-{episode}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, request: EpisodeRequest) -> None:
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        while True:
            request = await self._requests.get()
            reply = await self._answer(request)
            try:
                self._replies.send(reply)
            except TypeError as error:
                self._replies.send(self._refused("bad observation", error))
            if isinstance(request, Close):
                return

    async def _answer(self, request: EpisodeRequest) -> Reply:
        try:
            match request:
                case Reset():
                    self._environment = self._factory()
                    await self._environment.reset(_prompt(request))
                case Step():
                    observation = await self._environment.step(request.text, request.token_ids)
                    return _observed(self._episode, observation)
                case CutOff():
                    cut_off = getattr(self._environment, "cut_off", None)
                    reward = await cut_off() if cut_off is not None else None
                    return Ended(self._episode, _number(reward))
                case Close():
                    if self._environment is not None:
                        await self._environment.close()
        except BadObservation as error:
            return self._refused("bad observation", error)
        except BaseException as error:  # the user's environment may raise anything
            traceback.print_exc(file=sys.stderr)
            return self._refused(f"raised {type(error).__name__}", error)
        return Ended(self._episode)

    def _refused(self, kind: str, error: BaseException) -> Refused:
        return Refused(self._episode, kind, f"{type(error).__name__}: {error}")


def main() -> None:
    """Serves requests until the pool closes the channel."""
    requests, stream = claim_channel()
    replies = _Replies(stream)
    factory: Callable[[], Any] | None = None
    episodes: dict[int, _EpisodeThread] = {}
    while (body := read_frame(requests)) is not None:
        request = decode_request(body)
        if isinstance(request, Load):
            factory = _load(request, replies)
            continue
        if isinstance(request, Reset):
            assert factory is not None, "the pool loads the factory first"
            episodes[request.episode] = _EpisodeThread(request.episode, factory, replies)
        episodes[request.episode].put(request)
        if isinstance(request, Close):
            del episodes[request.episode]


def _load(request: Load, replies: _Replies) -> Callable[[], Any] | None:
    try:
        factory = load_factory(request.factory, request.options)
        stop_strings = check_environment(factory(), request.factory)
    except Exception as error:  # making an environment may raise anything
        if not isinstance(error, ValueError):
            traceback.print_exc(file=sys.stderr)
        text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        replies.send(Refused(-1, "load", text))
        return None
    replies.send(Loaded(stop_strings))
    return factory


def _prompt(request: Reset) -> Prompt:
    ids = np.array(request.token_ids, np.int32)
    return Prompt(request.index, request.text, ids, request.columns)


def _observed(episode: int, observation: Any) -> Observed:
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
        raise BadObservation(f"messages must be dictionaries, at least one, got {messages!r:.100}")
    return Observed(
        episode, text, ids, messages, bool(observation.is_done), _number(observation.reward),
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
