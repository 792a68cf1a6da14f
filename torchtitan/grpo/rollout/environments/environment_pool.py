# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The processes that environments run in.

An environment is the user's code: it may hang, crash, print or leak. A thread cannot be killed,
so it runs in a process that can be, many episodes to a process::

    OPEN --a call took too long--> DRAINING --last episode closed, or a second one--> killed
      \\------------------- ended by itself -----------------------------------------> lost

While a process is DRAINING its other episodes go on, and new ones begin in another. Episodes of
a process that is killed or lost are begun again elsewhere, see `episode`.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.rollout.environments.environment_messages import (
    LENGTH,
    Close,
    CutOff,
    Ended,
    EpisodeRequest,
    Load,
    Loaded,
    Observed,
    Refused,
    Reply,
    Request,
    Reset,
    Step,
    decode_reply,
    frame,
)
from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)

# What an environment imports and reads at its beginning takes longer than a step.
_LOAD_FACTOR = 10


class EnvironmentFailed(Exception):
    """One episode cannot go on. ``kind`` is the same for the same cause."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerLost(Exception):
    """The episode's process has ended, by whatever cause."""


class EnvironmentsFailing(RuntimeError):
    """Environments are broken, not just one episode: the run must stop."""


class EnvironmentPool:
    """Starts episodes, and counts how they fail.

    Args:
        factory: ``rollout.environment``.
        options: ``rollout.environment_options``.
        num_workers: ``rollout.environment_workers``.
        timeout_seconds: ``rollout.environment_timeout_seconds``.
        max_consecutive_failures: ``rollout.max_consecutive_failures``.

    Attributes:
        stop_strings: Of the environments, known once the pool is started.
        failures: Episodes that failed, by cause.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        timeout_seconds: float = 30.0,
        max_consecutive_failures: int = 32,
    ) -> None:
        self.stop_strings: list[str] = []
        self.failures: Counter[str] = Counter()
        self.timeout_seconds = timeout_seconds
        self._load = Load(factory, dict(options or {}))
        self._num_workers = num_workers
        self._max_consecutive_failures = max_consecutive_failures
        self._consecutive_failures = 0
        self._workers: set[_Worker] = set()
        self._starting = asyncio.Lock()
        self._counter = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts a first worker, in which the environment is found.

        Raises:
            EnvironmentsFailing: It is not.
        """
        await self._start_worker()

    async def open(self, prompt: Prompt) -> "RemoteEnvironment":
        """Begins an episode.

        Raises:
            EnvironmentFailed: ``reset`` raised or took too long.
            WorkerLost: Its process has ended.
            EnvironmentsFailing: No process can be started.
        """
        worker = await self._worker()
        remote = RemoteEnvironment(self, worker, next(self._counter))
        await remote.reset(prompt)
        return remote

    def record_failure(self, error: EnvironmentFailed) -> None:
        """Counts an episode that failed.

        Raises:
            EnvironmentsFailing: As many in a row as ``rollout.max_consecutive_failures``.
        """
        self.failures[error.kind] += 1
        if self.failures[error.kind] == 1:
            logger.warning("An environment failed (said once for each cause): %s", error)
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._max_consecutive_failures:
            raise EnvironmentsFailing(
                f"{self._consecutive_failures} episodes of rollout.environment in a row failed "
                f"(rollout.max_consecutive_failures = {self._max_consecutive_failures}). "
                f"The last reason: {error}"
            ) from error

    def record_success(self) -> None:
        """An episode came to its end."""
        self._consecutive_failures = 0

    async def close(self) -> None:
        """Kills the workers. Idempotent."""
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for worker in list(self._workers):
            await worker.kill()

    async def _worker(self) -> "_Worker":
        """The one with the fewest episodes; a new one where there are too few."""
        async with self._starting:
            usable = [worker for worker in self._workers if worker.is_open]
            if len(usable) < self._num_workers and all(w.episodes for w in usable):
                return await self._start_worker()
            return min(usable, key=lambda worker: len(worker.episodes))

    async def _start_worker(self) -> "_Worker":
        worker = _Worker(self)
        self._workers.add(worker)
        try:
            self.stop_strings = await worker.start(self._load)
        except EnvironmentsFailing:
            await worker.kill()
            raise
        return worker

    def close_later(self, remote: "RemoteEnvironment") -> None:
        """Has an episode closed, without waiting for it."""
        task = asyncio.create_task(remote.finish())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RemoteEnvironment:
    """An episode in a worker; see ``protocol.Environment``.

    Every method but :meth:`close` raises:
        EnvironmentFailed: It raised, or took too long.
        WorkerLost: Its process has ended.
    """

    def __init__(self, pool: EnvironmentPool, worker: "_Worker", episode: int) -> None:
        self._pool, self._worker, self._episode = pool, worker, episode
        self._hangs = False
        worker.episodes.add(episode)

    async def reset(self, prompt: Prompt) -> None:
        """Makes the environment and begins its episode."""
        ids = prompt.token_ids.tolist()
        request = Reset(self._episode, prompt.index, prompt.text, ids, prompt.columns)
        try:
            await self._ask(request, "reset")
        except BaseException:
            self.close()
            raise

    async def step(self, text: str, token_ids: list[int]) -> Observed:
        """What is observed after a turn."""
        reply = await self._ask(Step(self._episode, text, token_ids), "step")
        assert isinstance(reply, Observed), f"unexpected reply {reply!r}"
        return reply

    async def cut_off(self) -> float | None:
        """The reward of an episode that ends without being done."""
        reply = await self._ask(CutOff(self._episode), "cut_off")
        assert isinstance(reply, Ended), f"unexpected reply {reply!r}"
        return reply.reward

    def close(self) -> None:
        """Ends the episode, in the background."""
        self._pool.close_later(self)

    async def finish(self) -> None:
        """Ends the episode. What fails here has no consequence but for its process."""
        try:
            if not self._hangs:  # its thread would not come to it
                await self._ask(Close(self._episode), "close")
        except (EnvironmentFailed, WorkerLost) as error:
            logger.warning("An environment was not closed: %s", error)
        finally:
            await self._worker.leave(self._episode)

    async def _ask(self, request: EpisodeRequest, what: str) -> Reply:
        seconds = self._pool.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                reply = await self._worker.ask(self._episode, request)
        except TimeoutError as error:
            self._hangs = True
            await self._worker.drain()
            raise EnvironmentFailed(
                "timeout",
                f"The environment's {what} took longer than rollout.environment_timeout_seconds = "
                f"{seconds:g}.",
            ) from error
        if isinstance(reply, Refused):
            raise EnvironmentFailed(reply.kind, f"The environment's {what}: {reply.message}")
        return reply


class _Worker:
    """One process and its episodes."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._is_draining = False
        self._is_lost = False
        self.episodes: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether it takes new episodes."""
        return not (self._is_draining or self._is_lost)

    async def start(self, load: Load) -> list[str]:
        """Starts the process and finds the environment; returns its stop strings."""
        self._process = await asyncio.create_subprocess_exec(
            *LIGHT_PYTHON,
            "torchtitan.grpo.rollout.environments.environment_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._reader = asyncio.create_task(self._read())
        seconds = _LOAD_FACTOR * self._pool.timeout_seconds
        name = f"rollout.environment {load.factory!r}"
        try:
            async with asyncio.timeout(seconds):
                reply = await self.ask(-1, load)
        except TimeoutError as error:
            raise EnvironmentsFailing(
                f"Importing {name} took longer than {seconds:g} s, {_LOAD_FACTOR} times "
                "rollout.environment_timeout_seconds."
            ) from error
        except WorkerLost as error:
            raise EnvironmentsFailing(
                f"Importing {name} ended its process; its output is in rollout_process.log."
            ) from error
        if isinstance(reply, Refused):
            raise EnvironmentsFailing(reply.message)
        assert isinstance(reply, Loaded), f"unexpected reply {reply!r}"
        return reply.stop_strings

    async def ask(self, episode: int, request: Request) -> Reply:
        """The reply to an episode's request, of which there is one at a time."""
        process = self._process
        if self._is_lost or process is None or process.stdin is None:
            raise WorkerLost("The process of an environment has ended.")
        try:
            framed = frame(request)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(
                "column",
                f"A prompt's columns cannot be handed to the environment: {error}. They may hold "
                "plain data only: text, numbers, lists, dictionaries.",
            ) from error
        former = self._waiting.get(episode)
        if former is not None:  # a call that nobody waits for any more
            former.cancel()
        future = self._waiting[episode] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(framed)
            await process.stdin.drain()
            return await future
        except ConnectionError as error:
            raise WorkerLost("The process of an environment has ended.") from error
        finally:
            if self._waiting.get(episode) is future:
                del self._waiting[episode]

    async def leave(self, episode: int) -> None:
        """An episode has been closed."""
        self.episodes.discard(episode)
        if self._is_draining and not self.episodes:
            await self.kill()

    async def drain(self) -> None:
        """One of its threads hangs: no new episodes; with a second one, it is killed."""
        if self._is_draining:
            logger.warning("A second environment hangs in a process; it is killed.")
            await self.kill()
        self._is_draining = True

    async def kill(self) -> None:
        """Kills the process with whatever it started in its session."""
        process, self._process = self._process, None
        self._lose()
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            while True:
                header = await process.stdout.readexactly(LENGTH.size)
                body = await process.stdout.readexactly(LENGTH.unpack(header)[0])
                reply = decode_reply(body)
                episode = -1 if isinstance(reply, Loaded) else reply.episode
                future = self._waiting.get(episode)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.warning(
                "A process of rollout.environment has ended by itself with %d episodes in it; "
                "its output is in rollout_process.log.",
                len(self.episodes),
            )
            await self.kill()

    def _lose(self) -> None:
        self._is_lost = True
        self._pool._workers.discard(self)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(WorkerLost("The process of an environment has ended."))
                future.exception()  # nobody may be waiting for it any more
