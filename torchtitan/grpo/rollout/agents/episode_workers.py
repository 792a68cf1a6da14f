# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The processes of `function_worker`, each of which runs many episodes at the same time.

A thread that hangs cannot be killed without its process. The other episodes of the process are
therefore allowed to end first, and new ones begin in another process::

    OPEN --a call hangs--> RETIRED --last episode ended, or a second call hangs--> killed
      \\--------------- the process ended by itself ---------------> lost
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.config import Rollout, Workers
from torchtitan.grpo.rollout.agents.failures import EnvironmentsFailing
from torchtitan.grpo.rollout.agents.function_worker import (
    Ended,
    LoadEnvironment,
    LoadFunction,
    Run,
    decode_reply,
)
from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.host import Cancel, Cancelled
from torchtitan.grpo.workers.owner import OUTPUT_HINT, CallFailed, WorkerOwner
from torchtitan.grpo.workers.process import WorkerKilled, WorkerLost, WorkerProcess

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 5.0


@dataclass(eq=False)
class EpisodeWorker:
    process: WorkerProcess[Ended | Cancelled | Refused]
    num_episodes: int = 0
    is_retired: bool = False


class EpisodeWorkers:
    """At most ``number`` processes, besides those that are retired; each starts when it is needed.

    ``name`` is what the setting ``key`` loads. ``loaded`` is what a worker replied when it had.
    """

    def __init__(
        self,
        load: LoadFunction | LoadEnvironment,
        number: int,
        key: str,
        name: str,
        *,
        timeout_seconds: tuple[float, str],
        rollout: Rollout,
        workers: Workers,
        on_failure: Callable[[CallFailed], object],
    ) -> None:
        self.key, self.loaded = key, None
        # Raises EnvironmentsFailing if too many episodes in a row have failed.
        self.limit = self._owner = WorkerOwner(
            "torchtitan.grpo.rollout.agents.function_worker",
            decode_reply,
            load,
            subject=f"{key} {name!r}",
            calls=f"episodes of {key} in a row failed",
            error=EnvironmentsFailing,
            timeout_seconds=timeout_seconds,
            most_failures=(rollout.max_consecutive_failures, "rollout.max_consecutive_failures"),
            workers=workers,
            on_failure=on_failure,
        )
        self._number = number
        self._usable: list[EpisodeWorker] = []
        self._starting = asyncio.Lock()
        self._calls = itertools.count()

    async def start(self) -> None:
        """Starts the first worker."""
        await self.leave(await self.enter())

    async def enter(self) -> EpisodeWorker:
        """Adds an episode to the worker with the fewest, or to a new one while there are too few.

        Raises EnvironmentsFailing if a new process cannot load the user's code.
        """
        async with self._starting:
            self._usable = usable = [
                one for one in self._usable if not (one.process.is_lost or one.is_retired)
            ]
            if len(usable) < self._number and all(one.num_episodes for one in usable):
                process, reply = await self._owner.start(self._ended)
                assert isinstance(reply, Ended), f"unexpected reply {reply!r}"
                self.loaded = reply.result
                usable.append(EpisodeWorker(process))
            worker = min(usable, key=lambda one: one.num_episodes)
            worker.num_episodes += 1
            return worker

    async def leave(self, worker: EpisodeWorker) -> None:
        worker.num_episodes -= 1
        if worker.is_retired and not worker.num_episodes:
            await worker.process.kill()

    async def call(
        self, worker: EpisodeWorker, row: dict[str, Any], variables: Mapping[str, str]
    ) -> Ended | Refused:
        """Raises NotPlainData, and WorkerLost. A call that is cancelled is cancelled there, too."""
        number = next(self._calls)
        try:
            reply = await worker.process.call(Run(number, row, dict(variables)))
        except asyncio.CancelledError:
            await self._cancel(worker, number)
            raise
        assert not isinstance(reply, Cancelled), "a call that is cancelled is not answered"
        return reply

    async def retire(self, worker: EpisodeWorker) -> None:
        """Stops new episodes, because a thread hangs. After a second hang, kills the process."""
        if worker.is_retired and not worker.process.is_lost:
            logger.warning(
                "A worker process of %s is killed, because a second episode hangs in it.", self.key
            )
            await worker.process.kill()
        worker.is_retired = True

    async def close(self) -> None:
        await self._owner.close()

    async def _cancel(self, worker: EpisodeWorker, number: int) -> None:
        """Cancels one call; kills the worker if it does not answer: all of its episodes hang."""
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                await worker.process.call(Cancel(number))
        except TimeoutError:
            logger.warning(
                "A worker process of %s is killed: it did not end an episode within %g s. "
                "Its other episodes begin again.", self.key, _CANCEL_SECONDS,
            )  # fmt: skip
            await worker.process.kill()
        except WorkerLost:
            pass

    def _ended(self, reason: WorkerLost) -> None:
        if not isinstance(reason, WorkerKilled):
            logger.warning(
                "%s Episodes of %s that it ran begin again. %s", reason, self.key, OUTPUT_HINT
            )
