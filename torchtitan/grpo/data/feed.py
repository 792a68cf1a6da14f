# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Hands each rank its rows, from rank 0.

Rank 0 talks to the rollout process and plans; everybody else learns from one small
header what comes: a step, or the end. Tensors travel as they are, over a gloo group of
the feed's own, so that nothing is pickled and the training groups stay undisturbed.
"""

from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.grpo.data.plan import SampleTable, StepPlan
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.groups import new_group

# Advantages do not travel: each rank computes them from the table of samples.
_INT_FIELDS = ("tokens", "positions", "sequence_ids", "labels", "loss_mask", "sample_ids")
_FLOAT_FIELDS = ("generator_logprobs", "loss_weights", "ptx_weights")


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
    END = 4
    """There is nothing more to train on: finish as after the last step."""


@dataclass(frozen=True)
class TrainBatch:
    """One rank's share of a batch.

    Attributes:
        minibatches: This rank's rows of each optimizer step of one epoch, advantages still
            at 0; `data/plan.py` has ``epoch_order``. Every data-parallel rank has the same
            number of rows in each; it may differ from batch to batch, their length never.
        minibatch_tokens: For each minibatch the tokens that its loss is made of, over all
            ranks, supervised ones included. With 0 it has no gradient, and its optimizer
            step must be left out: momentum and weight decay alone would move the weights.
        samples: All samples of the batch, the same on every rank.
        num_trained_tokens: Completion tokens of rollouts, over all ranks and minibatches.
        num_tokens: Over all ranks and minibatches.
        publish_slot: Snapshot slot into which the batch's last weights go.
        prompt_position: Prompts used up with this batch; every rank checkpoints it.
    """

    minibatches: list[TrainRows]
    minibatch_tokens: list[int]
    samples: SampleTable
    num_trained_tokens: int
    num_tokens: int
    publish_slot: int
    prompt_position: int


@dataclass(frozen=True)
class _Header:
    """What every rank must know before the tensors come."""

    signal: int
    num_minibatches: int = 0
    num_rows: int = 0
    """Of one rank, in all minibatches together."""
    num_samples: int = 0
    num_trained_tokens: int = 0
    num_tokens: int = 0
    publish_slot: int = 0
    prompt_position: int = 0


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
        """Rank 0: announces the batch, scatters its rows, and shares its table of samples."""
        header = _Header(
            signal=Signal.STEP,
            num_minibatches=plan.num_minibatches,
            num_rows=plan.rows_of_rank[0].num_rows,
            num_samples=len(plan.samples),
            num_trained_tokens=plan.num_trained_tokens,
            num_tokens=plan.num_tokens,
            publish_slot=publish_slot,
            prompt_position=prompt_position,
        )
        self._broadcast_header(header)
        return self._exchange(header, plan)

    def send_signal(self, signal: Signal) -> None:
        """Rank 0: announces anything but a batch."""
        self._broadcast_header(_Header(signal))

    def receive(self) -> TrainBatch | Signal:
        """Other ranks: waits for rank 0's next word.

        Raises:
            RankZeroFailed: That word is FAIL.
        """
        header = self._broadcast_header(None)
        if header.signal == Signal.FAIL:
            raise RankZeroFailed
        if header.signal != Signal.STEP:
            return Signal(header.signal)
        return self._exchange(header, None)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def _broadcast_header(self, header: _Header | None) -> _Header:
        values = astuple(header or _Header(Signal.READY))
        tensor = torch.tensor([int(value) for value in values], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self.group)
        return _Header(*tensor.tolist())

    def _exchange(self, header: _Header, plan: StepPlan | None) -> TrainBatch:
        """The tensors that a STEP header announces; ``plan`` is there on rank 0 alone."""
        rows = self._scatter_rows(header.num_rows, plan)
        return TrainBatch(
            minibatches=rows.microbatches(header.num_rows // header.num_minibatches),
            minibatch_tokens=self._broadcast_tokens(header.num_minibatches, plan),
            samples=self._broadcast_samples(header.num_samples, plan),
            num_trained_tokens=header.num_trained_tokens,
            num_tokens=header.num_tokens,
            publish_slot=header.publish_slot,
            prompt_position=header.prompt_position,
        )

    def _scatter_rows(self, num_rows: int, plan: StepPlan | None) -> TrainRows:
        shape = (num_rows, self.row_len)
        ints = torch.empty(len(_INT_FIELDS), *shape, dtype=torch.int32)
        floats = torch.empty(len(_FLOAT_FIELDS), *shape, dtype=torch.float32)
        for out, names in ((ints, _INT_FIELDS), (floats, _FLOAT_FIELDS)):
            shares = None
            if plan is not None:
                stacks = [_stack(rows, names, out.dtype) for rows in plan.rows_of_rank]
                shares = [stacks[batch_rank] for batch_rank in self.batch_rank_of]
            dist.scatter(out, shares, src=0, group=self.group)
        fields = {name: ints[i].to(torch.int64) for i, name in enumerate(_INT_FIELDS)}
        fields["loss_mask"] = fields["loss_mask"].bool()
        fields |= {name: floats[i] for i, name in enumerate(_FLOAT_FIELDS)}
        return TrainRows(**fields, advantages=torch.zeros(shape))

    def _broadcast_tokens(self, num_minibatches: int, plan: StepPlan | None) -> list[int]:
        tokens = torch.empty(num_minibatches, dtype=torch.int64)
        if plan is not None:
            tokens = torch.tensor(plan.minibatch_tokens, dtype=torch.int64)
        dist.broadcast(tokens, src=0, group=self.group)
        return tokens.tolist()

    def _broadcast_samples(self, num_samples: int, plan: StepPlan | None) -> SampleTable:
        table = torch.empty(3, num_samples, dtype=torch.int64)
        if plan is not None:
            samples = plan.samples
            # The rewards' bits as integers, so that one exact tensor holds all columns.
            columns = [samples.rewards.view(np.int64), samples.group_ids]
            table = torch.from_numpy(np.stack([*columns, samples.completion_lengths]))
        if num_samples > 0:
            dist.broadcast(table, src=0, group=self.group)
        rewards, group_ids, completion_lengths = table.numpy()
        return SampleTable(rewards.view(np.float64), group_ids, completion_lengths)


def _stack(rows: TrainRows, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([getattr(rows, name).to(dtype) for name in names])
