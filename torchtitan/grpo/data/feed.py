# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gives each rank the rows that rank 0 has planned for it.

Only rank 0 talks to the rollout process and plans. It broadcasts a small message, which is a signal
such as the end of the run, or announces a batch whose rows follow. Messages and rows travel as plain
tensors over a gloo group of their own, so that nothing is pickled and training's process groups are
not used. With ``prompts.single_rank_load = false`` no rows follow: the message has packing lists, and
each rank fetches its rollouts from the rollout process.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from torchtitan.grpo.data.rows import COLUMNS, TrainRows, build_rows, sequences_of
from torchtitan.grpo.data.step_plan import SampleTable, StepPlan
from torchtitan.grpo.losses.loss_metrics import MetricTotals
from torchtitan.grpo.rollout.batch_fetch import BatchFetcher
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.groups import new_group
from torchtitan.grpo.types import BatchPart, PromptProgress, Rollout

# Advantages do not travel: each rank computes them from the table of samples.
_INT_FIELDS = (
    "tokens", "positions", "reach", "sequence_ids", "labels", "loss_mask", "sample_ids",
)  # fmt: skip
_FLOAT_FIELDS = ("generator_logprobs", "loss_weights", "ptx_weights")


class RankZeroFailed(RuntimeError):
    """Rank 0 has failed and reports the reason itself; this rank only ends."""


class Signal(IntEnum):
    READY = 0
    """Servers, prompts and rewards are ready: training begins."""
    LEND = 1
    """Rank 0 waits for a batch: make room on the device for lent servers, then wait on."""
    STOP = 2
    """The run was asked to stop: end in order and write a checkpoint."""
    FAIL = 3
    """Rank 0 has failed and reports the reason itself: end at once."""
    END = 4
    """No batches are left: finish as after the last step."""
    HALT = 5
    """A guard of rank 0 ends the run: as STOP, and the run has failed."""


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What all ranks know about a batch, or about a part of one.

    Attributes:
        minibatch_tokens: For each minibatch, the number of tokens with a loss over all ranks,
            supervised ones included. If it is 0, the minibatch has no gradient and its
            optimizer step must be left out: momentum and weight decay would move the weights.
        num_trained_tokens: Completion tokens of rollouts, over all ranks and minibatches.
        num_tokens: Prompt and completion tokens, over all ranks and minibatches.
        mass: Total mass of the loss weights (`losses/advantages.py`), over all ranks.
        part: Which part of its batch this is.
        publish_slot: Snapshot slot that the weights after the batch are copied into.
        progress: Progress through the prompts, this batch included. Every rank keeps it for
            checkpoints, because any rank's copy may be the one that is written.
        logged_groups, num_logged: As in :class:`StepPlan`.
    """

    minibatch_tokens: list[int]
    num_trained_tokens: int
    num_tokens: int
    mass: int
    part: BatchPart
    publish_slot: int
    progress: PromptProgress
    logged_groups: int = 0
    num_logged: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainBatch(BatchFacts):
    """The rows of a batch, or of a part of one, that one rank trains on.

    Attributes:
        minibatches: The rank's rows for each optimizer step of one epoch, with advantages of 0;
            ``epoch_order`` in `data/step_plan.py` gives the order. Every data-parallel rank has
            the same number of rows in each minibatch. The number may differ between batches;
            the length of a row does not.
        samples: All samples of the batch, the same on every rank.
    """

    minibatches: list[TrainRows]
    samples: SampleTable


@dataclass(frozen=True)
class FetchAddress:
    """The place where ranks fetch the rollouts of a batch; see `rollout/batch_fetch.py`."""

    endpoint: str
    secret: str
    version: int


class _Fetched(msgspec.Struct):
    """An entry of a packing list: row ``row`` gets sequence ``part`` of the batch's rollout ``source``."""

    row: int
    source: int
    sample_id: int
    part: int
    group: int
    loss_weight: float


@dataclass(frozen=True, kw_only=True)
class _Step(BatchFacts):
    """The message that announces a batch to all ranks."""

    num_rows: int
    """Number of rows of one rank, in all minibatches together."""
    samples: bytes
    """[3, samples] int64: the bits of the rewards, the group ids and the completion lengths."""
    columns: dict[str, tuple[int, ...]]
    """Shape at one position of each column of the rows that rank 0 scatters."""
    address: FetchAddress | None
    """None if rank 0 scatters the rows."""
    packing_lists: list[list[_Fetched]]
    """What each data-parallel rank fetches, in the order of its rows."""


class Feed:
    """Distributes plans and signals over the ranks.

    ``batch_rank`` is this rank's index among the data-parallel ranks. A rank waits at most
    ``timeout_seconds`` for rank 0's next message, and ``fetch_seconds`` for rollouts that it
    fetches.
    """

    own_seconds: Callable[[], float] | None = None
    """Measures this rank's work since the last call, which all ranks then learn with the metrics."""

    def __init__(
        self,
        batch_rank: int,
        row_len: int,
        timeout_seconds: float,
        fetch_seconds: float = 60.0,
    ) -> None:
        self.row_len = row_len
        self._fetch_seconds = fetch_seconds
        self._client: BatchFetcher | None = None
        self.group = new_group("grpo_feed", "gloo", timeout_seconds)
        self.rank = dist.get_rank()
        told: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
        dist.all_gather_object(told, (batch_rank, uuid.uuid4().hex), group=self.group)
        self.batch_rank_of = [each for each, _ in told]
        self._own_of_ranks = torch.zeros(len(told), dtype=torch.float64)
        dist.barrier(group=self.group)
        spans.sync(told[0][1])  # each start of a run has a moment of its own

    def send_step(
        self,
        plan: StepPlan,
        publish_slot: int,
        progress: PromptProgress,
        address: FetchAddress | None = None,
        *,
        part: BatchPart = BatchPart.WHOLE,
    ) -> TrainBatch:
        """Announces a batch, scatters its rows and broadcasts its samples. Called on rank 0.

        ``address`` tells where ranks fetch their rollouts; None scatters the rows from rank 0.
        See :class:`TrainBatch` for the other arguments.
        """
        table = plan.samples
        columns = [table.rewards.view(np.int64), table.group_ids, table.completion_lengths]
        step = _Step(
            num_rows=len(plan.layout[0]),
            minibatch_tokens=plan.minibatch_tokens,
            samples=np.stack(columns).tobytes(),
            num_trained_tokens=plan.num_trained_tokens,
            num_tokens=plan.num_tokens,
            mass=plan.mass,
            part=part,
            publish_slot=publish_slot,
            progress=progress,
            logged_groups=plan.logged_groups,
            num_logged=plan.num_logged,
            columns=plan.column_shapes if address is None else {},
            address=address,
            packing_lists=[] if address is None else _packing_lists(plan),
        )
        self._broadcast(step)
        return self._exchange(step, plan)

    def send_signal(self, signal: Signal) -> None:
        """Announces anything but a batch. Called on rank 0."""
        self._broadcast(signal)

    def receive(self) -> TrainBatch | Signal:
        """Waits for the next batch or signal of rank 0. Called on all other ranks.

        Raises :class:`RankZeroFailed` if the signal is FAIL.
        """
        received = self._broadcast(None)
        if received is Signal.FAIL:
            raise RankZeroFailed
        return received if isinstance(received, Signal) else self._exchange(received, None)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def join_logged(
        self, parts: Sequence[tuple[TrainBatch, torch.Tensor | None]]
    ) -> np.ndarray | None:
        """Joins the values [2, tokens] of the logged tokens in each part of a batch, in the order of ranks.

        A rank that is not counted passes None. Returns None without ``parts``. Collective.
        """
        joined: list[torch.Tensor] = []
        for part, own in parts:
            of_ranks = list(torch.zeros(2, sum(part.num_logged)).split(part.num_logged, dim=1))
            if own is not None:
                of_ranks[self.batch_rank_of[self.rank]] = own
            joined += of_ranks
        return self.all_reduce_sum(torch.cat(joined, dim=1)).numpy() if joined else None

    def all_reduce_metrics(
        self, totals: MetricTotals, grad_norm: torch.Tensor | None = None
    ) -> float:
        """Combines the metrics of all ranks, in place, and returns rank 0's gradient norm.

        The host waits for the device once in this call. Gradient norms may differ between ranks in their
        last bits, so all ranks use rank 0's norm and make the same decisions.
        """
        norm = totals.fetch(grad_norm)
        own = torch.tensor([norm if self.rank == 0 else 0.0], dtype=torch.float64)
        work = torch.zeros(0, dtype=torch.float64)
        if self.own_seconds is not None:
            work = torch.zeros_like(self._own_of_ranks)
            work[self.rank] = self.own_seconds()
        numbers = torch.cat([totals.added, work, own])
        dist.all_reduce(numbers, group=self.group)
        totals.added, work, own = numbers.split([len(totals.added), len(work), 1])
        norm = float(own)
        if self.own_seconds is not None:
            self._own_of_ranks += work
        if len(totals.largest) > 0:
            dist.all_reduce(totals.largest, op=dist.ReduceOp.MAX, group=self.group)
        return norm

    def take_own_seconds(self) -> list[float]:
        """Returns what ``own_seconds`` gave on each rank in the reductions since the last call."""
        taken = self._own_of_ranks.tolist()
        self._own_of_ranks.zero_()
        return taken

    def _broadcast(self, message: Signal | _Step | None) -> Signal | _Step:
        """Sends rank 0's message; the other ranks pass None and receive it."""
        content = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self.group)
        if message is None:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.group)
        return msgspec.msgpack.decode(content.numpy().tobytes(), type=Signal | _Step)

    def _exchange(self, step: _Step, plan: StepPlan | None) -> TrainBatch:
        """Exchanges the tensors of a step. Only rank 0 passes a ``plan``."""
        if step.address is None:
            rows = self._scatter_rows(step, plan)
        else:
            rows = self._fetch_rows(step, step.address)
        table = np.frombuffer(step.samples, np.int64).reshape(3, -1).copy()
        return TrainBatch(
            minibatches=rows.microbatches(step.num_rows // len(step.minibatch_tokens)),
            samples=SampleTable(table[0].view(np.float64), table[1], table[2]),
            **{fact.name: getattr(step, fact.name) for fact in fields(BatchFacts)},
        )

    def _scatter_rows(self, step: _Step, plan: StepPlan | None) -> TrainRows:
        shape = (step.num_rows, self.row_len)
        ints = self._scatter(_INT_FIELDS, shape, torch.int32, plan)
        fields = {name: tensor.to(torch.int64) for name, tensor in ints.items()}
        fields["loss_mask"] = fields["loss_mask"].bool()
        fields |= self._scatter(_FLOAT_FIELDS, shape, torch.float32, plan)
        columns = {}
        for name, of_token in step.columns.items():
            dtype = torch.from_numpy(COLUMNS[name].filled(0)).dtype
            columns |= self._scatter((name,), (*shape, *of_token), dtype, plan)
        return TrainRows(**fields, advantages=torch.zeros(shape), columns=columns)

    def _scatter(
        self,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        plan: StepPlan | None,
    ) -> dict[str, torch.Tensor]:
        """Scatters some fields of the rows as one tensor; returns this rank's part of each by name."""
        out = torch.empty(len(names), *shape, dtype=dtype)
        of_ranks = None
        if plan is not None:
            stacks = [_stack(rows, names, dtype) for rows in plan.rows_of_rank]
            of_ranks = [stacks[batch_rank] for batch_rank in self.batch_rank_of]
        dist.scatter(out, of_ranks, src=0, group=self.group)
        return dict(zip(names, out.unbind(), strict=True))

    def _fetch_rows(self, step: _Step, address: FetchAddress) -> TrainRows:
        if self._client is None or self._client.endpoint != address.endpoint:
            self.close()
            self._client = BatchFetcher(address.endpoint, address.secret)
        entries = step.packing_lists[self.batch_rank_of[self.rank]]
        sources = [entry.source for entry in entries]
        fetched = self._client.fetch(address.version, sources, self._fetch_seconds)
        # Rank 0 may ask for the next batch only after every rank has fetched from this one.
        dist.barrier(group=self.group)
        return _rows_from(entries, fetched, step.num_rows, self.row_len)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _stack(rows: TrainRows, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    tensors = rows.tensors()
    return torch.stack([tensors[name].to(dtype) for name in names])


def _packing_lists(plan: StepPlan) -> list[list[_Fetched]]:
    lists = []
    for rows in plan.layout:
        entries = [(row, plan.sequences[i]) for row, members in enumerate(rows) for i in members]
        assert all(sample.source >= 0 for _, sample in entries), (
            "supervised sequences cannot be fetched: the rollout process does not hold them"
        )
        lists.append(
            [
                _Fetched(row, s.source, s.sample_id, s.part, s.group, s.loss_weight)
                for row, s in entries
            ]
        )
    return lists


def _rows_from(
    entries: Sequence[_Fetched], fetched: Sequence[Rollout], num_rows: int, row_len: int
) -> TrainRows:
    """Lays out the fetched rollouts, one for each entry, in rows just as rank 0 would."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    samples = []
    for i, (entry, rollout) in enumerate(zip(entries, fetched, strict=True)):
        rows[entry.row].append(i)
        sequences = sequences_of(
            rollout,
            sample_id=entry.sample_id,
            loss_weight=entry.loss_weight,
            group=entry.group,
        )
        samples.append(sequences[entry.part])
    return build_rows(samples, rows, row_len)
