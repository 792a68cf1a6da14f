# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Calls the user's environments in a worker process. Each episode has its own thread and event loop.

A step that blocks delays only its own episode. A thread that hangs runs until the process ends.
"""

import asyncio
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.system.functions import describe_error, failure_kind, load_function, user_line
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import refused

# A longer text must be a mistake, because it would exceed any context many times over.
_MAX_CHARACTERS = 4_000_000

_WHAT = "rollout.environment: environment"
BUILTIN = {"calculator": "torchtitan.grpo.rollout.environments.calculator:Calculator"}


class BadObservation(Exception):
    """The environment returned an observation or reward that is not valid."""


class Player:
    """Makes an environment for each episode. Raises ValueError, with advice, if the factory fails."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self._factory = _find_factory(path, options)
        try:
            environment = self._factory()
        except Exception as error:  # the user's factory may raise anything
            traceback.print_exc(file=sys.stderr)
            raise ValueError(describe_error(error) + user_line(error)) from error
        self.stop_strings = _check_environment(environment, path)
        self._episodes: dict[int, _EpisodeThread] = {}

    async def call(self, episode: int, method: str, **arguments: Any) -> Any:
        """Calls a method of an episode's environment. The first must be ``reset``, and the last ``close``.

        Returns what the method returns, or Refused if the environment failed.
        """
        if method == "reset":
            self._episodes[episode] = _EpisodeThread(f"environment-{episode}", self._factory)
        if (thread := self._episodes.get(episode)) is None:
            return None  # closed before it began
        try:
            return await thread.call(method, arguments)
        finally:
            if method == "close":
                thread.end()
                self._episodes.pop(episode, None)


class _EpisodeThread:
    def __init__(self, name: str, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()
        self._ends = asyncio.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ends.wait())

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        called: Coroutine[Any, Any, Any] = getattr(self, f"_{method}")(**arguments)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_guarded(called), self._loop)
        )

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)

    async def _reset(
        self, group_id: int, text: Any, token_ids: list[int], columns: dict[str, Any]
    ) -> None:
        self._environment = self._factory()
        ids = np.array(token_ids, np.int32)
        await self._environment.reset(Prompt(group_id, text, ids, columns))

    async def _step(self, text: str, token_ids: list[int]) -> Observation:
        return _checked(await self._environment.step(text, token_ids))

    async def _cut_off(self) -> float | None:
        cut_off = getattr(self._environment, "cut_off", None)
        return _number(await cut_off() if cut_off is not None else None)

    async def _close(self) -> None:
        if self._environment is not None:
            await self._environment.close()


async def _guarded(called: Coroutine[Any, Any, Any]) -> Any:
    """Returns the call's result, or Refused if it raises. Some exceptions would end the event loop."""
    try:
        return await called
    except BadObservation as error:
        return refused("bad observation", describe_error(error))
    except BaseException as error:  # the user's environment may raise anything
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        traceback.print_exc(file=sys.stderr)
        return refused(failure_kind(error), describe_error(error) + user_line(error))


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
    """Checks an environment that a factory has made, and returns its stop strings."""
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
    found = Observation(
        text, ids, messages, bool(observation.is_done), _number(observation.reward),
        bool(observation.has_special_tokens),
    )  # fmt: skip
    try:
        msgspec.msgpack.encode(found)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadObservation(str(error)) from error
    return found


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, str | bytes) or not math.isfinite(number := float(reward)):
        raise BadObservation(f"reward must be a finite number or None, got {reward!r:.100}")
    return number
