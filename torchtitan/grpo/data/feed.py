# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Hands each rank its rows, from rank 0.

Rank 0 talks to the rollout process and plans; everybody else learns from one small
header what comes: a step, or the end. Tensors travel as they are, over a gloo group of
the feed's own, so that nothing is pickled and the training groups stay undisturbed.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from torchtitan.grpo.data.plan import StepPlan
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.groups import new_group

_INT_FIELDS = ("tokens", "positions", "sequence_ids", "labels", "loss_mask")
_FLOAT_FIELDS = ("generator_logprobs", "advantages")
_HEADER_LENGTH = 6


class RankZeroFailed(RuntimeError):
    """Rank 0 ended the run and says why itself; this rank only leaves."""


class Signal(IntEnum):
    """What a header announces."""

    READY = 0
    """Servers, prompts and rewards are there: training begins."""
    STEP = 1
    STOP = 2
    """Asked to stop: end in order, and keep a checkpoint."""
    FAIL = 3
    """Rank 0 failed and says why itself: leave at once."""


@dataclass(frozen=True)
class TrainBatch:
    """One rank's share of a step.

    Attributes:
        rows: This rank's rows; every data-parallel rank has the same number.
        num_trained_tokens: Over all ranks; the loss is divided by it.
        num_tokens: Over all ranks.
        publish_slot: Snapshot slot into which the step's weights go.
        prompt_position: Prompts used up with this step; every rank checkpoints it.
    """

    rows: TrainRows
    num_trained_tokens: int
    num_tokens: int
    publish_slot: int
    prompt_position: int


class Feed:
    """The scatter of plans; see the module's docstring.

    Args:
        batch_rank: This rank's index among the data-parallel ranks.
        row_len: ``training.seq_len``.
        timeout_seconds: How long a rank waits for rank 0's next header.
    """

    def __init__(self, batch_rank: int, row_len: int, timeout_seconds: float) -> None:
        self.row_len = row_len
        self.group = new_group("grpo_feed", "gloo", timeout_seconds)
        self.rank = dist.get_rank()
        batch_ranks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(batch_ranks, batch_rank, group=self.group)
        self.batch_rank_of = batch_ranks

    def send_step(self, plan: StepPlan, publish_slot: int, prompt_position: int) -> TrainBatch:
        """Rank 0: announces the step and scatters its rows."""
        num_rows = plan.rows_of_rank[0].num_rows
        header = [
            Signal.STEP, num_rows, plan.num_trained_tokens, plan.num_tokens, publish_slot,
            prompt_position,
        ]  # fmt: skip
        self._broadcast_header(header)
        shares = [_stack(plan.rows_of_rank[b]) for b in self.batch_rank_of]
        ints, floats = self._scatter(num_rows, shares)
        return _batch(header, ints, floats)

    def send_signal(self, signal: Signal) -> None:
        """Rank 0: announces the end."""
        self._broadcast_header([signal] + [0] * (_HEADER_LENGTH - 1))

    def receive(self) -> TrainBatch | Signal:
        """Other ranks: waits for rank 0's next word.

        Raises:
            RankZeroFailed: That word is FAIL.
        """
        header = self._broadcast_header(None)
        if header[0] == Signal.FAIL:
            raise RankZeroFailed
        if header[0] != Signal.STEP:
            return Signal(header[0])
        ints, floats = self._scatter(header[1], None)
        return _batch(header, ints, floats)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def _broadcast_header(self, header: list[int] | None) -> list[int]:
        tensor = torch.tensor(header or [0] * _HEADER_LENGTH, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self.group)
        return tensor.tolist()

    def _scatter(
        self, num_rows: int, shares: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_rows, self.row_len)
        ints = torch.empty(len(_INT_FIELDS), *shape, dtype=torch.int32)
        floats = torch.empty(len(_FLOAT_FIELDS), *shape, dtype=torch.float32)
        for out, part in ((ints, 0), (floats, 1)):
            scattered = [share[part] for share in shares] if shares is not None else None
            dist.scatter(out, scattered, src=0, group=self.group)
        return ints, floats


def _stack(rows: TrainRows) -> tuple[torch.Tensor, torch.Tensor]:
    ints = torch.stack([getattr(rows, name).to(torch.int32) for name in _INT_FIELDS])
    return ints, torch.stack([getattr(rows, name) for name in _FLOAT_FIELDS])


def _batch(header: list[int], ints: torch.Tensor, floats: torch.Tensor) -> TrainBatch:
    fields = {name: ints[i].to(torch.int64) for i, name in enumerate(_INT_FIELDS)}
    fields["loss_mask"] = fields["loss_mask"].bool()
    fields |= {name: floats[i] for i, name in enumerate(_FLOAT_FIELDS)}
    return TrainBatch(
        rows=TrainRows(**fields),
        num_trained_tokens=header[2],
        num_tokens=header[3],
        publish_slot=header[4],
        prompt_position=header[5],
    )
