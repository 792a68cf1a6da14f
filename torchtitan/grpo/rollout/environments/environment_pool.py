# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs episodes in worker processes that can be killed. Each process runs many episodes.

A thread that hangs cannot be killed without its process. The other episodes of the process are
therefore allowed to end first, and new ones begin in another process::

    OPEN --a call timed out--> DRAINING --last episode closed, or a second timeout--> killed
      \\------------------- the process ended by itself --------------------------> lost

The episodes of a process that is killed or lost begin again elsewhere; see `episode`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable

from torchtitan.grpo.config import Rollout, Workers
from torchtitan.grpo.rollout.agents.failures import EnvironmentFailed, EnvironmentsFailing
from torchtitan.grpo.rollout.environments.environment_worker import (
    Close,
    CutOff,
    Done,
    EnvironmentLoaded,
    EpisodeRequest,
    LoadEnvironment,
    Observed,
    Reply,
    Reset,
    Step,
    decode_reply,
)
from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, not_passed
from torchtitan.grpo.workers.owner import OUTPUT_HINT, CallFailed, WorkerOwner
from torchtitan.grpo.workers.process import WorkerKilled, WorkerLost, WorkerProcess

logger = logging.getLogger(__name__)


class EnvironmentPool:
    """Begins episodes of ``rollout.environment``; ``stop_strings`` are known once it is started."""

    def __init__(
        self,
        rollout: Rollout,
        workers: Workers | None = None,
        on_failure: Callable[[CallFailed], object] = lambda failure: None,
        key: str = "rollout.environment",
    ) -> None:
        factory, seconds = rollout.environment, rollout.environment_timeout_seconds
        assert factory is not None, "rollout.environment must be set"
        self.stop_strings: list[str] = []
        self.timeout_seconds = seconds
        # Raises EnvironmentsFailing if too many episodes in a row have failed.
        self.limit = self._owner = WorkerOwner(
            "torchtitan.grpo.rollout.environments.environment_worker",
            decode_reply,
            LoadEnvironment(factory, rollout.environment_options),
            subject=f"{key} {factory!r}",
            calls=f"episodes of {key} in a row failed",
            error=EnvironmentsFailing,
            timeout_seconds=(seconds, "rollout.environment_timeout_seconds"),
            most_failures=(rollout.max_consecutive_failures, "rollout.max_consecutive_failures"),
            workers=workers or Workers(),
            on_failure=on_failure,
        )
        self._num_workers = rollout.environment_workers
        self._usable: list[_Worker] = []
        self._starting = asyncio.Lock()
        self._counter = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts the first worker; the others start when they are first needed."""
        await self._worker()

    async def open(self, prompt: Prompt) -> "RemoteEnvironment":
        """Begins an episode; raises as :class:`RemoteEnvironment`.

        Raises EnvironmentsFailing if a new process cannot load the environment.
        """
        remote = RemoteEnvironment(self, await self._worker(), next(self._counter))
        await remote.reset(prompt)
        return remote

    async def close(self) -> None:
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await self._owner.close()

    async def _worker(self) -> "_Worker":
        """The worker with the fewest episodes, or a new one while there are too few."""
        async with self._starting:
            self._usable = usable = [worker for worker in self._usable if worker.is_open]
            if len(usable) < self._num_workers and all(w.episodes for w in usable):
                worker = _Worker()
                worker.process, reply = await self._owner.start(worker.ended)
                assert isinstance(reply, EnvironmentLoaded), f"unexpected reply {reply!r}"
                self.stop_strings = reply.stop_strings
                usable.append(worker)
                return worker
            return min(usable, key=lambda worker: len(worker.episodes))

    def close_later(self, remote: "RemoteEnvironment") -> None:
        task = asyncio.create_task(remote.finish())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RemoteEnvironment:
    """An episode in a worker process; see ``protocol.Environment``.

    :meth:`reset`, :meth:`step` and :meth:`cut_off` raise EnvironmentFailed if the environment's
    method raised or timed out, and WorkerLost if the process has ended.
    """

    def __init__(self, pool: EnvironmentPool, worker: "_Worker", episode: int) -> None:
        self._pool, self._worker, self._episode = pool, worker, episode
        self._hangs = False
        worker.episodes.add(episode)

    async def reset(self, prompt: Prompt) -> None:
        ids = prompt.token_ids.tolist()
        try:
            await self._ask(
                Reset(self._episode, prompt.group_id, prompt.text, ids, prompt.columns), "reset"
            )
        except NotPlainData as error:
            self.close()
            message = not_passed(prompt, prompt.columns, "the environment", error)
            raise EnvironmentFailed("column", message) from error
        except BaseException:
            self.close()
            raise

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        reply = await self._ask(Step(self._episode, text, token_ids), "step")
        assert isinstance(reply, Observed), f"unexpected reply {reply!r}"
        return reply.observation

    async def cut_off(self) -> float | None:
        reply = await self._ask(CutOff(self._episode), "cut_off")
        assert isinstance(reply, Done), f"unexpected reply {reply!r}"
        return reply.reward

    def close(self) -> None:
        self._pool.close_later(self)

    async def finish(self) -> None:
        try:
            if not self._hangs:  # a hanging thread would not read the request
                await self._ask(Close(self._episode), "close")
        except (EnvironmentFailed, WorkerLost) as error:
            logger.warning("An environment was not closed: %s", error)
        finally:
            await self._worker.leave(self._episode)

    async def _ask(self, request: EpisodeRequest, method: str) -> Reply:
        seconds = self._pool.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                reply = await self._worker.process.call(request)
        except TimeoutError as error:
            self._hangs = True
            await self._worker.drain()
            raise EnvironmentFailed(
                "timeout",
                f"The environment's {method} took longer than "
                f"rollout.environment_timeout_seconds = {seconds:g}.",
            ) from error
        if isinstance(reply, Refused):
            kind = f"reset {reply.kind}" if method == "reset" else reply.kind
            raise EnvironmentFailed(kind, f"The environment's {method}: {reply.message}")
        return reply


class _Worker:
    process: WorkerProcess[Reply | Refused]

    def __init__(self) -> None:
        self.episodes: set[int] = set()
        self._is_draining = False

    @property
    def is_open(self) -> bool:
        return not (self._is_draining or self.process.is_lost)

    async def leave(self, episode: int) -> None:
        self.episodes.discard(episode)
        if self._is_draining and not self.episodes:
            await self.process.kill()

    async def drain(self) -> None:
        """Stops new episodes, because a thread hangs. After a second hang, kills the process."""
        if self._is_draining:
            logger.warning(
                "A worker process is killed, because a second environment hangs in the process."
            )
            await self.process.kill()
        self._is_draining = True

    def ended(self, reason: WorkerLost) -> None:
        if not isinstance(reason, WorkerKilled):
            logger.warning(
                "%s It ran %d episodes of rollout.environment, which begin again elsewhere. %s",
                reason, len(self.episodes), OUTPUT_HINT,
            )  # fmt: skip
