# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lends the devices of all ranks to servers, and takes them back.

Rank 0 announces a loan while it waits for the first part of a batch, so that the other ranks wait
for that batch in :meth:`Loan.receive`. All ranks make room and meet, and only then are servers
woken. A batch arrives once these servers sleep again. The devices are also lent before the first
batch, while servers start and evaluate, and after the last one. They are never lent in the middle
of a batch that arrives in parts, because its gradient is incomplete then. Which servers wake and
sleep is the lender's to say (`rollout/lending/lender.py`).

The training loop calls :meth:`Loan.before_wait`, ``on_batch``, ``before_step`` and ``metrics``.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchtitan.grpo.config.cluster import count_servers, lent_groups, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.freed_memory import CudaMemory, Room
from torchtitan.grpo.training.learner import Learner
from torchtitan.grpo.training.reference import Reference


class LoanFailed(RunError):
    """Ranks could not make room on their devices."""


class Loan:
    """Lends this rank's device together with those of all other ranks; on the training thread.

    Without a ``room`` nothing is lent, and nothing announced. ``await_staging`` waits until no
    checkpoint copies the states that the room moves.

    Attributes:
        until: On rank 0 the version whose batch ends the loan; None while nothing is lent.
        notify: Called on rank 0 with that version once servers may use the devices.
    """

    def __init__(
        self, feed: Feed, room: Room | None = None, await_staging: Callable[[], None] = lambda: None
    ) -> None:
        self._feed, self._room, self._await_staging = feed, room, await_staging
        self._num_bytes = self._seconds = 0.0
        self.until: int | None = None
        self.notify: Callable[[int], None] = lambda version: None

    def before_wait(self, version: int) -> None:
        """Lends the devices of all ranks until the batch of ``version``; see :meth:`make_room`."""
        self.make_room(version)
        self.tell()

    def make_room(self, version: int) -> None:
        """Makes room on all ranks, while the others wait in :meth:`receive`. Called on rank 0.

        Raises LoanFailed with the ranks that could not, and why.
        """
        if self._room is not None:
            self._feed.send_signal(Signal.LEND)
            self._give(self._room)
            self.until = version

    def tell(self) -> None:
        """Tells the rollout process of the loan, also one that was started after it."""
        if self.until is not None:
            self.notify(self.until)

    def _give(self, room: Room) -> None:
        begin, error = time.perf_counter(), None
        given = torch.zeros(2, dtype=torch.float64)  # bytes, and the number of ranks that failed
        try:
            self._await_staging()
            given[0] = room.give()
        except Exception as failure:  # rank 0 raises it below, once all ranks are here
            error, given[1] = failure, 1.0
        # No server may be woken before all ranks are here.
        num_bytes, num_failed = self._feed.all_reduce_sum(given).tolist()
        if num_failed:
            self._report(error)
        self._num_bytes += num_bytes
        self._seconds += time.perf_counter() - begin

    def _report(self, error: Exception | None) -> None:
        """Raises LoanFailed on rank 0. The other ranks learn it from rank 0's next message."""
        problems: list[str | None] = [None] * dist.get_world_size()
        text = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(problems, text, group=self._feed.group)
        if self._feed.rank == 0:
            failed = [f"rank {rank}: {what}" for rank, what in enumerate(problems) if what]
            raise LoanFailed(
                "All ranks must make room on their devices for lent servers, but "
                f"{len(failed)} of {len(problems)} could not. " + "; ".join(failed)
            ) from error

    def receive(self) -> TrainBatch | Signal:
        """Waits for rank 0's next message, and makes room when it says so. Not for rank 0."""
        while (received := self._feed.receive()) is Signal.LEND:
            assert self._room is not None, "rank 0 lends, and so do all ranks of the run"
            self._give(self._room)
        if isinstance(received, TrainBatch):
            self.on_batch()
        return received

    def on_batch(self) -> None:
        """Begins to reclaim the device, once a batch has arrived."""
        self.until = None
        if self._room is not None:
            self._room.reclaim()

    def before_step(self) -> None:
        """Orders what follows on the device after what :meth:`on_batch` has begun."""
        if self._room is not None:
            self._room.finish_reclaim()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call: bytes of all ranks together, seconds of this one."""
        if self._room is None:
            return {}
        metrics = {
            "lend/room_bytes": self._num_bytes,
            "lend/room_give_seconds": self._seconds,
            "lend/room_take_seconds": self._room.reclaim_seconds(),
        }
        self._num_bytes = self._seconds = 0.0
        return metrics


def build_loan(trainer: Trainer, feed: Feed, learner: Learner) -> Loan:
    config: JobConfig = trainer.job_config  # pyright: ignore[reportAssignmentType]
    if not config.lends_devices:
        return Loan(feed)
    if feed.rank == 0:
        logger.info(
            f"While ranks wait for rollouts, {count_servers(lent_groups(config))} of "
            f"{count_servers(server_groups(config))} servers use their devices, if that is faster"
        )
    reference = learner.scorer.reference
    parts = [part for trainee in learner.trainees for part in trainee.parts]
    parts += reference.parts if isinstance(reference, Reference) else []
    optimizers = [o for trainee in learner.trainees for o in trainee.optimizers.optimizers]
    offloads = config.optimizer.offload_while_lent
    memory = CudaMemory(trainer.device) if trainer.device.type == "cuda" else None
    room = Room(parts, optimizers, memory, offloads=offloads)
    return Loan(feed, room, trainer.checkpointer.maybe_wait_for_staging)
