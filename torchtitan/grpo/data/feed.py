# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gives each rank the rows that rank 0 has planned for it.

Only rank 0 talks to the rollout process and plans. It broadcasts a small header, which tells
the other ranks what follows: a batch, or a signal such as the end of the run. Tensors travel as
they are over a gloo group that belongs to the feed, so that nothing is pickled and the groups
of the training are not used. With ``prompts.single_rank_load = false`` rank 0 sends only
packing lists, and each rank fetches its rollouts from the rollout process.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.grpo.data.rows import COLUMNS, Sample, TrainRows, build_rows, sequences_of
from torchtitan.grpo.data.step_plan import SampleTable, StepPlan
from torchtitan.grpo.losses.loss_metrics import MetricTotals
from torchtitan.grpo.rollout.batch_fetch import BatchFetcher
from torchtitan.grpo.system.groups import new_group
from torchtitan.grpo.types import BatchPart, PromptProgress, Rollout

# Advantages do not travel: each rank computes them from the table of samples.
_INT_FIELDS = ("tokens", "positions", "sequence_ids", "labels", "loss_mask", "sample_ids")
_ADDRESS_BYTES = 256
_FLOAT_FIELDS = ("generator_logprobs", "loss_weights", "ptx_weights")
_NO_COLUMN = -1
_NOTHING = -1
_LIST_WIDTH = 4
"""Entries of a sequence in a packing list: its row, source, sample id and part."""


class RankZeroFailed(RuntimeError):
    """Rank 0 has failed and reports the reason itself; this rank only ends."""


class Signal(IntEnum):
    READY = 0
    """Servers, prompts and rewards are ready: training begins."""
    STEP = 1
    STOP = 2
    """The run was asked to stop: end in order and write a checkpoint."""
    FAIL = 3
    """Rank 0 has failed and reports the reason itself: end at once."""
    END = 4
    """No batches are left: finish as after the last step."""
    HALT = 5
    """A guard of rank 0 ends the run: as STOP, and the run has failed."""


@dataclass(frozen=True)
class TrainBatch:
    """Holds the rows that one rank trains on, of a batch or of a part of it.

    Attributes:
        minibatches: The rank's rows for each optimizer step of one epoch, with advantages of 0;
            ``epoch_order`` in `data/step_plan.py` gives the order. Every data-parallel rank has
            the same number of rows in each minibatch. The number may differ between batches;
            the length of a row does not.
        minibatch_tokens: For each minibatch, the number of tokens with a loss over all ranks,
            supervised ones included. If it is 0, the minibatch has no gradient and its
            optimizer step must be left out: momentum and weight decay would move the weights.
        samples: All samples of the batch, the same on every rank.
        num_trained_tokens: Completion tokens of rollouts, over all ranks and minibatches.
        num_tokens: Prompt and completion tokens, over all ranks and minibatches.
        mass: Total mass of the loss weights (`losses/aggregation.py`), over all ranks.
        part: Which part of its batch this is.
        publish_slot: Snapshot slot that the weights after the batch are copied into.
        progress: Progress through the prompts, this batch included. Every rank keeps it for
            checkpoints, because any rank's copy may be the one that is written.
    """

    minibatches: list[TrainRows]
    minibatch_tokens: list[int]
    samples: SampleTable
    num_trained_tokens: int
    num_tokens: int
    mass: int
    part: BatchPart
    publish_slot: int
    progress: PromptProgress


@dataclass(frozen=True)
class _Header:
    """Tells every rank what it must know before it receives the tensors."""

    signal: int
    num_minibatches: int = 0
    num_rows: int = 0
    """Number of rows of one rank, in all minibatches together."""
    num_samples: int = 0
    num_trained_tokens: int = 0
    num_tokens: int = 0
    mass: int = 0
    part: int = BatchPart.WHOLE
    publish_slot: int = 0
    prompt_position: int = 0
    num_fetched: int = 0
    """Number of sequences of the rank that fetches the most."""
    fetch_version: int = -1
    """Version of the batch that ranks fetch rollouts of; -1 where rank 0 scatters the rows."""
    num_open_prompts: int = 0
    widths: tuple[int, ...] = (_NO_COLUMN,) * len(COLUMNS)
    """For each of ``COLUMNS`` of the rows that rank 0 scatters the length of a token's list, 0 if it
    has one value, or -1 if there is no such column."""


@dataclass(frozen=True)
class FetchAddress:
    """The place where ranks fetch the rollouts of a batch; see `rollout/batch_fetch.py`."""

    endpoint: str
    secret: str
    version: int


class Feed:
    """Distributes plans and signals over the ranks.

    ``batch_rank`` is this rank's index among the data-parallel ranks. A rank waits at most
    ``timeout_seconds`` for rank 0's next header, and ``fetch_seconds`` for rollouts that it
    fetches.
    """

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
        batch_ranks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(batch_ranks, batch_rank, group=self.group)
        self.batch_rank_of = batch_ranks

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
        header = _Header(
            signal=Signal.STEP,
            num_minibatches=plan.num_minibatches,
            num_rows=len(plan.layout[0]),
            num_fetched=max(map(_num_sequences, plan.layout)) if address is not None else 0,
            fetch_version=address.version if address is not None else -1,
            num_samples=len(plan.samples),
            num_trained_tokens=plan.num_trained_tokens,
            num_tokens=plan.num_tokens,
            mass=plan.mass,
            part=part,
            publish_slot=publish_slot,
            prompt_position=progress.position,
            num_open_prompts=len(progress.open),
            widths=_widths(plan.column_shapes if address is None else {}),
        )
        self._broadcast_header(header)
        return self._exchange(header, plan, progress, address)

    def send_signal(self, signal: Signal) -> None:
        """Announces anything but a batch. Called on rank 0."""
        self._broadcast_header(_Header(signal))

    def receive(self) -> TrainBatch | Signal:
        """Waits for the next batch or signal of rank 0. Called on all other ranks.

        Raises :class:`RankZeroFailed` if the signal is FAIL.
        """
        header = self._broadcast_header(None)
        if header.signal == Signal.FAIL:
            raise RankZeroFailed
        if header.signal != Signal.STEP:
            return Signal(header.signal)
        return self._exchange(header, None, None, None)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def all_reduce_metrics(
        self, totals: MetricTotals, grad_norm: torch.Tensor | None = None
    ) -> float:
        """Combines the metrics of all ranks, in place, and returns rank 0's gradient norm.

        The host waits here for the device, once. The norm is the same on all ranks but for its
        last bits, which depend on the layout. With one rank's number all ranks decide the same.
        """
        norm = totals.fetch(grad_norm)
        own = torch.tensor([norm if self.rank == 0 else 0.0], dtype=torch.float64)
        numbers = torch.cat([totals.added, own])
        dist.all_reduce(numbers, group=self.group)
        totals.added, norm = numbers[:-1], float(numbers[-1])
        if len(totals.largest) > 0:
            dist.all_reduce(totals.largest, op=dist.ReduceOp.MAX, group=self.group)
        return norm

    def _broadcast_header(self, header: _Header | None) -> _Header:
        *values, widths = astuple(header or _Header(Signal.READY))
        tensor = torch.tensor([*map(int, values), *widths], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self.group)
        found = tensor.tolist()
        return _Header(*found[: len(values)], widths=tuple(found[len(values) :]))

    def _exchange(
        self,
        header: _Header,
        plan: StepPlan | None,
        progress: PromptProgress | None,
        address: FetchAddress | None,
    ) -> TrainBatch:
        """Exchanges the tensors that a STEP header announces. Only rank 0 passes a ``plan``."""
        if header.fetch_version < 0:
            rows = self._scatter_rows(header, plan)
        else:
            rows = self._fetch_rows(header, plan, address)
        return TrainBatch(
            minibatches=rows.microbatches(header.num_rows // header.num_minibatches),
            minibatch_tokens=self._broadcast_tokens(header.num_minibatches, plan),
            samples=self._broadcast_samples(header.num_samples, plan),
            num_trained_tokens=header.num_trained_tokens,
            num_tokens=header.num_tokens,
            mass=header.mass,
            part=BatchPart(header.part),
            publish_slot=header.publish_slot,
            progress=self._broadcast_progress(header, progress),
        )

    def _scatter_rows(self, header: _Header, plan: StepPlan | None) -> TrainRows:
        shape = (header.num_rows, self.row_len)
        ints = self._scatter(_INT_FIELDS, shape, torch.int32, plan)
        fields = {name: tensor.to(torch.int64) for name, tensor in ints.items()}
        fields["loss_mask"] = fields["loss_mask"].bool()
        fields |= self._scatter(_FLOAT_FIELDS, shape, torch.float32, plan)
        columns = {}
        for (name, column), width in zip(COLUMNS.items(), header.widths, strict=True):
            if width != _NO_COLUMN:
                of_column = (*shape, width) if column.is_list else shape
                dtype = torch.from_numpy(column.filled(0)).dtype
                columns |= self._scatter((name,), of_column, dtype, plan)
        return TrainRows(**fields, advantages=torch.zeros(shape), columns=columns)

    def _scatter(
        self,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        plan: StepPlan | None,
    ) -> dict[str, torch.Tensor]:
        """Scatters fields of the ranks' rows together as one tensor; returns them by name."""
        out = torch.empty(len(names), *shape, dtype=dtype)
        of_ranks = None
        if plan is not None:
            stacks = [_stack(rows, names, dtype) for rows in plan.rows_of_rank]
            of_ranks = [stacks[batch_rank] for batch_rank in self.batch_rank_of]
        dist.scatter(out, of_ranks, src=0, group=self.group)
        return dict(zip(names, out.unbind(), strict=True))

    def _fetch_rows(
        self, header: _Header, plan: StepPlan | None, address: FetchAddress | None
    ) -> TrainRows:
        where = torch.empty(header.num_fetched, _LIST_WIDTH, dtype=torch.int64)
        weights = torch.empty(header.num_fetched, dtype=torch.float64)
        of_batch_rank = []
        if plan is not None:
            of_batch_rank = [
                _packing_list(rows, plan.sequences, header.num_fetched) for rows in plan.layout
            ]
        for index, out in enumerate((where, weights)):
            of_ranks = [of_batch_rank[r][index] for r in self.batch_rank_of] if plan else None
            dist.scatter(out, of_ranks, src=0, group=self.group)
        client = self._client_for(address)
        fetched = client.fetch(
            header.fetch_version, where[where[:, 0] != _NOTHING][:, 1].tolist(), self._fetch_seconds
        )
        return _rows_from(where, weights, fetched, num_rows=header.num_rows, row_len=self.row_len)

    def _client_for(self, address: FetchAddress | None) -> BatchFetcher:
        words = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        if address is not None:
            text = f"{address.endpoint} {address.secret}".encode()
            words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(words, src=0, group=self.group)
        endpoint, secret = bytes(words.tolist()).rstrip(b"\0").decode().split()
        if self._client is None or self._client.endpoint != endpoint:
            self.close()
            self._client = BatchFetcher(endpoint, secret)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _broadcast_tokens(self, num_minibatches: int, plan: StepPlan | None) -> list[int]:
        tokens = torch.empty(num_minibatches, dtype=torch.int64)
        if plan is not None:
            tokens = torch.tensor(plan.minibatch_tokens, dtype=torch.int64)
        dist.broadcast(tokens, src=0, group=self.group)
        return tokens.tolist()

    def _broadcast_progress(
        self, header: _Header, progress: PromptProgress | None
    ) -> PromptProgress:
        indices = torch.empty(header.num_open_prompts, dtype=torch.int64)
        if progress is not None:
            indices = torch.tensor(progress.open, dtype=torch.int64)
        if header.num_open_prompts > 0:
            dist.broadcast(indices, src=0, group=self.group)
        return PromptProgress(header.prompt_position, tuple(indices.tolist()))

    def _broadcast_samples(self, num_samples: int, plan: StepPlan | None) -> SampleTable:
        table = torch.empty(3, num_samples, dtype=torch.int64)
        if plan is not None:
            samples = plan.samples
            # Rewards travel as the integers with the same bits, so that one exact tensor holds all.
            columns = [samples.rewards.view(np.int64), samples.group_ids]
            table = torch.from_numpy(np.stack([*columns, samples.completion_lengths]))
        if num_samples > 0:
            dist.broadcast(table, src=0, group=self.group)
        rewards, group_ids, completion_lengths = table.numpy()
        return SampleTable(rewards.view(np.float64), group_ids, completion_lengths)


def _stack(rows: TrainRows, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    tensors = rows.tensors()
    return torch.stack([tensors[name].to(dtype) for name in names])


def _num_sequences(rows: list[list[int]]) -> int:
    return sum(map(len, rows))


def _widths(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(shapes[name]) if name in shapes else _NO_COLUMN for name in COLUMNS)


def _packing_list(
    rows: Sequence[Sequence[int]], samples: Sequence[Sample], num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of a rank's ``rows``, with room for the most that any rank has.

    Returns [num_entries, 4] int64 with the row, source, sample id and part of each sequence, in
    the order of the rows, and -1 in the entries behind the last one, and [num_entries] float64
    with loss weights.
    """
    where = torch.full((num_entries, _LIST_WIDTH), _NOTHING, dtype=torch.int64)
    weights = torch.zeros(num_entries, dtype=torch.float64)
    entries = [(row, samples[index]) for row, members in enumerate(rows) for index in members]
    for i, (row, sample) in enumerate(entries):
        assert sample.source >= 0, (
            "supervised sequences cannot be fetched: the rollout process does not hold them"
        )
        where[i] = torch.tensor([row, sample.source, sample.sample_id, sample.part])
        weights[i] = sample.loss_weight
    return where, weights


def _rows_from(
    where: torch.Tensor,
    weights: torch.Tensor,
    fetched: Sequence[Rollout],
    *,
    num_rows: int,
    row_len: int,
) -> TrainRows:
    """Lays out fetched rollouts, one for each entry of :func:`_packing_list`, as rank 0 would."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    samples = []
    for i, rollout in enumerate(fetched):
        rows[int(where[i, 0])].append(i)
        sequences = sequences_of(rollout, sample_id=int(where[i, 2]), loss_weight=float(weights[i]))
        samples.append(sequences[int(where[i, 3])])
    return build_rows(samples, rows, row_len)
