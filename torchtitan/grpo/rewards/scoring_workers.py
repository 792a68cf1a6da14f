# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Places groups on reward workers, each of which scores several of them side by side.

A group that exceeds the time limit, or that nobody waits for any more, is cancelled, which disturbs
no other one. Three things do::

    OPEN --the thread of a group hangs--> DRAINING --its last group has left--> killed
      \\--the event loop does not answer---------------------------------------> killed
       \\-the process ends by itself-------------------------------------------> lost

Which group blocked an event loop or ended a process is not known, so all groups that the worker
was scoring are scored again, one at a time, in a process of their own. Only there do they fail.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from torchtitan.grpo.rewards.reward_calls import Score
from torchtitan.grpo.rewards.scoring_worker import Loaded, Reply
from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.host import Cancel, Cancelled
from torchtitan.grpo.workers.owner import OUTPUT_HINT, WorkerOwner
from torchtitan.grpo.workers.process import WorkerLost, WorkerProcess

logger = logging.getLogger(__name__)

_Process = WorkerProcess[Reply | Refused]

# An event loop that does not answer within this time is blocked.
_CANCEL_SECONDS = 5.0


class ScoringWorkers:
    """Sends requests to at most ``num_workers`` processes of ``owner``, and one more for blame."""

    def __init__(self, owner: WorkerOwner[Reply], num_workers: int, timeout_seconds: float) -> None:
        self._owner, self._num_workers = owner, num_workers
        self.timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        # Both are known once the first worker has loaded the functions.
        self._concurrency, self.warning = 1, ""
        self._has_changed = asyncio.Event()
        self._alone: _Worker | None = None
        self._num_alone = 0
        self._one_alone = asyncio.Lock()

    async def start(self) -> None:
        """Starts the first worker; the others are started when they are first needed."""
        await self._leave(await self._join_new())

    async def score(self, request: Score, on_begin: Callable[[], object]) -> Reply | Refused:
        """Sends a request, and again if its worker was lost with several groups.

        ``on_begin`` is called when a worker has room for it. Raises TimeoutError after the time
        limit, WorkerLost if the process ended, NotPlainData if the request cannot be sent, and the
        owner's error if a new process cannot be started.
        """
        worker = await self._join()
        on_begin()
        try:
            return await self._ask(worker, request)
        except (TimeoutError, WorkerLost):
            if not worker.was_shared:
                raise
        finally:
            await self._leave(worker)
        return await self._score_alone(request)

    async def _score_alone(self, request: Score) -> Reply | Refused:
        self._num_alone += 1
        try:
            async with self._one_alone:
                if self._alone is None or not self._alone.is_open:
                    self._alone = await self._started(_Worker())
                self._alone.num_groups = 1
                try:
                    return await self._ask(self._alone, request)
                finally:
                    await self._leave(self._alone)
        finally:
            self._num_alone -= 1
            if not self._num_alone and self._alone is not None:
                await self._alone.kill()

    async def _join(self) -> "_Worker":
        """The worker with the fewest groups, or a new one while there are too few."""
        while True:
            self._workers = [worker for worker in self._workers if worker.is_open]
            if len(self._workers) < self._num_workers and all(w.num_groups for w in self._workers):
                return await self._join_new()
            usable = [w for w in self._workers if w.process and w.num_groups < self._concurrency]
            if usable:
                worker = min(usable, key=lambda worker: worker.num_groups)
                worker.num_groups += 1
                return worker
            self._has_changed.clear()
            await self._has_changed.wait()  # each group that is being scored has its time limit

    async def _join_new(self) -> "_Worker":
        worker = _Worker(num_groups=1)
        self._workers.append(worker)
        try:
            return await self._started(worker)
        except BaseException:
            self._workers.remove(worker)  # the next group tries again
            raise
        finally:
            self._has_changed.set()

    async def _started(self, worker: "_Worker") -> "_Worker":
        worker.process, reply = await self._owner.start(worker.ended)
        assert isinstance(reply, Loaded), f"unexpected reply {reply!r}"
        self._concurrency, self.warning = reply.concurrency, reply.warning
        return worker

    async def _leave(self, worker: "_Worker") -> None:
        worker.num_groups -= 1
        self._has_changed.set()
        if worker.is_draining and not worker.num_groups:
            await worker.kill()

    async def _ask(self, worker: "_Worker", request: Score) -> Reply | Refused:
        process = worker.process
        assert process is not None, "it was started"
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await process.call(request)
        except TimeoutError:
            await self._cancel(worker, process, request.number)
            raise
        except asyncio.CancelledError:  # it would stay busy with what nobody waits for
            with contextlib.suppress(WorkerLost):
                await self._cancel(worker, process, request.number)
            raise

    async def _cancel(self, worker: "_Worker", process: _Process, group: int) -> None:
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                reply = await process.call(Cancel(group))
        except (TimeoutError, asyncio.CancelledError) as error:
            await process.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        assert isinstance(reply, Cancelled), f"unexpected reply {reply!r}"
        worker.is_draining = worker.is_draining or reply.hangs


class _Worker:
    """``process`` is None until it has been started."""

    def __init__(self, num_groups: int = 0) -> None:
        self.process: _Process | None = None
        self.num_groups = num_groups
        self.is_draining = False
        self.was_shared = False

    @property
    def is_open(self) -> bool:
        return not (self.is_draining or (self.process is not None and self.process.is_lost))

    async def kill(self) -> None:
        if self.process is not None:
            await self.process.kill()

    def ended(self, reason: WorkerLost) -> None:
        self.was_shared = self.num_groups > 1
        if self.was_shared:
            logger.warning(
                "%s It was scoring %d groups, which are scored again one at a time. %s",
                reason, self.num_groups, OUTPUT_HINT,
            )  # fmt: skip
