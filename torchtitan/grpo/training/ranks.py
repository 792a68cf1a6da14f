# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Roles of ranks: which rows a rank trains, and what only rank 0 does while the others wait.

Only rank 0 talks to the rollout process and to servers. The others wait for its signal to continue, to
stop, or to leave because rank 0 failed. While they wait, they lend their devices if rank 0 says so
(`Loan.receive`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.upstream.parallelism import ParallelDims

# Ranks along these axes of the mesh train the same rows and see the same output.
_AXES_OF_EQUAL_ROWS = ("tp", "cp")


@dataclass(frozen=True)
class RankRole:
    """Place of a rank among the ranks that train.

    The batch has ``num_batch_ranks`` parts, and this rank trains part number ``batch_rank``. Tensor-,
    context- and pipeline-parallel ranks share a part. Exactly one of the ranks that share it
    ``is_counted``: only its values enter sums over all ranks (losses, metrics, KL).
    """

    num_batch_ranks: int
    batch_rank: int
    is_counted: bool


def rank_role(dims: ParallelDims, *, has_output: bool) -> RankRole:
    """Returns this rank's role; ``has_output`` is True in the last pipeline stage."""
    num_batch_ranks, batch_rank = 1, 0
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        num_batch_ranks, batch_rank = mesh.size(), mesh.get_local_rank()
    meshes = [dims.get_optional_mesh(axis) for axis in _AXES_OF_EQUAL_ROWS]
    is_first = not any(mesh.get_local_rank() for mesh in meshes if mesh is not None)
    return RankRole(num_batch_ranks, batch_rank, is_counted=has_output and is_first)


class RankZeroTurn:
    """Runs work on rank 0 and tells the other ranks how it ended.

    Only rank 0's ``stop`` decides, because ranks may receive a signal at different moments.
    If the work fails, ``explain`` is called on rank 0 with the error, and may raise a clearer one. The
    other ranks wait in ``receive`` for rank 0's next message.
    """

    def __init__(
        self,
        feed: Feed,
        stop: StopRequest,
        explain: Callable[[BaseException], None],
        receive: Callable[[], TrainBatch | Signal],
    ) -> None:
        self._feed, self._stop, self._explain = feed, stop, explain
        self._receive = receive

    def run(self, work: Callable[[], None]) -> bool:
        """Runs ``work`` on rank 0 while the others wait. Returns on every rank whether to stop."""
        if self._feed.rank != 0:
            return self._receive() is Signal.STOP
        with self.releasing_others():
            work()
        is_stopped = self._stop.requested
        self._feed.send_signal(Signal.STOP if is_stopped else Signal.READY)
        return is_stopped

    @contextmanager
    def releasing_others(self) -> Iterator[None]:
        """Tells the waiting ranks to leave if the ``with`` block fails on rank 0.

        The other ranks' next call must be ``receive``: another collective would not match and would hang.
        """
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the other ranks may have ended already
                self._feed.send_signal(Signal.FAIL)
            self._explain(error)
            raise


def patience_seconds(config: JobConfig) -> float:
    """Returns how long other ranks wait for rank 0: longer than startup, a batch of rollouts, two
    evaluations and a push may take together.
    """
    return (
        120
        + config.inference.startup_timeout_seconds
        + config.rollout.batch_timeout_seconds
        + 2 * config.evaluation.timeout_seconds
        + 2 * config.weight_sync.timeout_seconds
    )
