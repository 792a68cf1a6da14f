# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Places calls on worker processes, each of which answers several calls concurrently.

A cancelled call is cancelled in its process as well, which disturbs no other call. Three events do
disturb other calls::

    OPEN --the thread of a call hangs--> RETIRED --its last user has left--> killed
      \\--the event loop does not answer-----------------------------------> killed
       \\-the process ends by itself---------------------------------------> lost
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.host import Cancel, Cancelled
from torchtitan.grpo.workers.owner import OUTPUT_HINT, WorkerOwner
from torchtitan.grpo.workers.process import WorkerLost, WorkerProcess

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

# An event loop that does not answer within this time is blocked.
_CANCEL_SECONDS = 5.0


@dataclass(eq=False)
class Worker(Generic[Reply]):
    """A process with ``num_users``. It ``was_shared`` if it had several users when it was lost."""

    process: WorkerProcess[Reply | Refused] | None = None
    num_users: int = 0
    is_retired: bool = False
    was_shared: bool = False
    starting: "asyncio.Task[None]" = field(init=False)

    @property
    def is_lost(self) -> bool:
        return self.process is not None and self.process.is_lost


class WorkerPool(Generic[Reply]):
    """At most ``number`` processes, besides those that are retired; each starts when it is needed.

    ``most_users`` reads from a worker's reply to loading how many users a worker may have at a time.
    """

    def __init__(
        self,
        owner: WorkerOwner[Reply],
        number: int,
        most_users: Callable[[Reply], int] = lambda loaded: sys.maxsize,
    ) -> None:
        self.loaded: Reply | None = None
        self._owner, self._number = owner, number
        self._read_most_users, self._most_users = most_users, 1
        self._workers: list[Worker[Reply]] = []
        self._has_changed = asyncio.Event()

    async def start(self) -> None:
        """Starts the first worker."""
        await self.leave(await self.enter())

    async def enter(self) -> Worker[Reply]:
        """Becomes a user of the worker with the fewest users, or of a new one if all are busy.

        Raises the owner's error if a new process cannot load the user's code.
        """
        worker = await self._with_room()
        worker.num_users += 1
        try:
            await asyncio.shield(worker.starting)  # for which others may wait, too
        except BaseException:
            await self.leave(worker)
            raise
        return worker

    async def leave(self, worker: Worker[Reply]) -> None:
        worker.num_users -= 1
        self._has_changed.set()
        if worker.is_retired and not worker.num_users and worker.process is not None:
            await worker.process.kill()

    async def call(self, worker: Worker[Reply], request: Any) -> Reply | Refused:
        """Sends a request; if cancelled, cancels it in the worker too. Raises NotPlainData and WorkerLost."""
        process = worker.process
        assert process is not None, "a worker is entered first"
        try:
            return await process.call(request)
        except asyncio.CancelledError:  # it would stay busy with what nobody waits for
            with contextlib.suppress(WorkerLost):
                await self._cancel(worker, process, request.number)
            raise

    async def _with_room(self) -> Worker[Reply]:
        while True:
            usable = [w for w in self._workers if not (w.is_retired or w.is_lost)]
            if len(usable) < self._number and all(worker.num_users for worker in usable):
                usable.append(self._new())
            self._workers = usable
            worker = min(usable, key=lambda worker: worker.num_users)
            if worker.num_users < self._most_users:
                return worker
            self._has_changed.clear()
            await self._has_changed.wait()

    def _new(self) -> Worker[Reply]:
        worker = Worker[Reply]()
        worker.starting = asyncio.create_task(self._start(worker))
        # Whoever waits for it is told; it may be that nobody does any more.
        worker.starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return worker

    async def _start(self, worker: Worker[Reply]) -> None:
        def ended(reason: WorkerLost) -> None:
            worker.was_shared = worker.num_users > 1
            if worker.process is not None and worker.num_users and not self._owner.is_closed:
                logger.warning(
                    "%s It was running %d calls of %s. %s",
                    reason, worker.num_users, self._owner.subject, OUTPUT_HINT,
                )  # fmt: skip

        try:
            worker.process, self.loaded = await self._owner.start(ended)
            self._most_users = self._read_most_users(self.loaded)
        except BaseException:
            worker.is_retired = True  # the next user starts another one
            raise
        finally:
            self._has_changed.set()

    async def _cancel(
        self, worker: Worker[Reply], process: WorkerProcess[Reply | Refused], number: int
    ) -> None:
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                reply = await process.call(Cancel(number))
        except (TimeoutError, asyncio.CancelledError) as error:
            await process.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        assert isinstance(reply, Cancelled), f"unexpected reply {reply!r}"
        worker.is_retired = worker.is_retired or reply.hangs
