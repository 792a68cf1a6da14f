# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The packed rows that a step trains on.

A row is aligned to the *predicted* token: at position ``t`` it holds the input token ``t``, and
the label, mask, logprob, weight and advantage of token ``t + 1``. Only the sample id stands on
all tokens of its sample. A row consists of spans (`shared_context.py`): sequences, or contexts
that sequences share and the rests of these sequences. A token at place ``q`` sees the tokens before
it whose ``reach`` is above ``q``.

Example: prompt ``[5, 6]``, completion ``[7, 8]``, both the step's sample 3, row length 6::

    tokens        5 6 7 8 0 0
    positions     0 1 2 3 0 1
    reach         4 4 4 4 6 6      (padding is a separate span)
    sequence_ids  0 0 0 0 1 1
    labels        6 7 8 0 0 0
    loss_mask     0 1 1 0 0 0
    sample_ids    3 3 3 3 -1 -1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from torchtitan.grpo.data.shared_context import NO_GROUP, Span, spans_of
from torchtitan.grpo.types import Rollout, columns_of

NO_SAMPLE = -1
"""Sample id of padding and of supervised sequences in ``TrainRows.sample_ids``."""

COLUMNS = {name: column for name, column in columns_of(Rollout).items() if column.in_rows}
"""Columns of rollouts that rows may have."""


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: a rollout, or a supervised (ptx) sequence.

    Attributes:
        prompt_ids: [prompt_len] int32; may be empty in a supervised sequence.
        completion_ids: [completion_len] int32.
        generator_logprobs: [completion_len] float32; None for a supervised sequence.
        sample_id: Index in the step's table of samples, or :data:`NO_SAMPLE`.
        loss_weight: Weight of every trained token of a rollout in the global loss.
        ptx_weight: Weight of every predicted completion token of a supervised sequence.
        sampled: [completion_len] bool, True for the tokens that are trained; None if all are. The
            other tokens, which the model did not write, are only context.
        source: Position of a rollout among all rollouts of its batch.
        part: Position of the sequence among those of its rollout.
        group: Sequences of a group in one row share the contexts with which they begin;
            :data:`NO_GROUP` for one that shares nothing.
        columns: Those of :data:`COLUMNS` that the rollout has.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    generator_logprobs: np.ndarray | None
    sample_id: int = NO_SAMPLE
    loss_weight: float = 0.0
    ptx_weight: float = 0.0
    sampled: np.ndarray | None = None
    source: int = -1
    part: int = 0
    group: int = NO_GROUP
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_predicted(self) -> int:
        """Number of completion tokens with a token before them: without a prompt, all but one."""
        return self.num_tokens - max(len(self.prompt_ids), 1)

    @property
    def num_trained(self) -> int:
        """Number of predicted tokens that count in the loss: the sampled ones."""
        if self.sampled is None:
            return self.num_predicted
        return int(np.count_nonzero(self.sampled[-self.num_predicted :]))


@dataclass(frozen=True)
class TrainRows:
    """Packed rows, the input of the model and the loss. Shapes are [rows, seq] unless stated otherwise.

    Attributes:
        tokens: int64.
        positions: int64, those of the tokens in their sequence.
        reach: int64, one more than the place in the row of the last token that sees this token.
        sequence_ids: int64, one id for each span of a row, padding included. All tokens of a
            sequence with a loss are in one span.
        labels: int64, the next token of the same sequence, 0 at its end.
        loss_mask: bool, True where the label is a sampled token of a rollout.
        generator_logprobs: float32, the label's logprob on the server; 0 where not trained.
        advantages: float32, of the label; 0 where not trained, and everywhere until
            :meth:`with_advantages` fills them in.
        loss_weights: float32, weight of the label's loss in the global loss; 0 where not
            trained. The denominators are those of the whole optimizer step, so that sums over
            microbatches and ranks need no further division.
        ptx_weights: float32, weight of supervised completion tokens, ``grpo.ptx_coef``
            included; 0 elsewhere.
        sample_ids: int64, index in the step's table of samples, on all tokens of a rollout but
            those that it shares; :data:`NO_SAMPLE` elsewhere.
        columns: Values for the label of those :data:`COLUMNS` that any rollout has: [rows, seq] or
            [rows, seq, k], with the column's ``fill`` where not trained.
        host_mask: bool, :attr:`scored` in host memory, wherever the other tensors are, so that the host
            need not wait for a device. This and ``host_reach`` are computed if they are not given.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    reach: torch.Tensor
    sequence_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    ptx_weights: torch.Tensor
    sample_ids: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    host_mask: torch.Tensor = None  # pyright: ignore[reportAssignmentType]
    host_reach: torch.Tensor = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.host_mask is None:
            object.__setattr__(self, "host_mask", self.scored.cpu())
        if self.host_reach is None:
            object.__setattr__(self, "host_reach", self.reach.cpu())

    @property
    def scored(self) -> torch.Tensor:
        """[rows, seq] bool, True where the loss uses the label's logprob."""
        return self.loss_mask | (self.ptx_weights != 0)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "TrainRows":
        return self._changed(
            lambda name, tensor: (
                tensor if name.startswith("host_") else tensor.to(device, non_blocking=True)
            )
        )

    def microbatches(self, size: int) -> list["TrainRows"]:
        begins = range(0, self.num_rows, size)
        return [self.select(slice(begin, begin + size)) for begin in begins]

    def select(self, rows: slice) -> "TrainRows":
        """Returns some of the rows, as views."""
        return self._changed(lambda name, tensor: tensor[rows])

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "columns"}
        return named | dict(self.columns)

    def _changed(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "TrainRows":
        changed = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        columns = {name: changed.pop(name) for name in self.columns}
        return TrainRows(**changed, columns=columns)

    def with_advantages(self, advantages: np.ndarray) -> "TrainRows":
        """Returns these rows in which each trained token has its sample's entry of ``advantages`` [samples]."""
        # NO_SAMPLE, which is -1, looks up the additional entry at the end.
        table = torch.from_numpy(np.append(advantages, 0.0).astype(np.float32))
        # A copy that blocks would wait for the optimizer step before this batch.
        looked_up = table.to(self.sample_ids.device, non_blocking=True)[self.sample_ids]
        return replace(self, advantages=torch.where(self.loss_mask, looked_up, 0.0))


def sequences_of(rollout: Rollout, **settings: float) -> list[Sample]:
    """Returns the sequences of a rollout, in the order of its turns.

    There are several sequences if a request did not continue the tokens of the previous one, because of a
    chat template or an agent. Each begins with the context that the server was sent. ``settings`` are
    further attributes of all sequences, such as the sample id, with which the rollout counts as one sample.
    """
    ids = rollout.token_ids
    prompts = [rollout.prompt_ids]
    begins, ends = [0], []
    for start, num_context in rollout.new_rows:
        ends.append(start)
        prompts.append(ids[start : start + num_context])
        begins.append(start + num_context)
    ends.append(len(ids))
    if ends[0] == 0:  # nothing follows the prompt
        del prompts[0], begins[0], ends[0]
    values = {name: getattr(rollout, name) for name in COLUMNS}
    columns = {name: array for name, array in values.items() if array is not None}
    return [
        Sample(
            prompt,
            ids[begin:end],
            np.asarray(rollout.logprobs)[begin:end],
            sampled=None if rollout.sampled is None else rollout.sampled[begin:end],
            part=part,
            columns={name: array[begin:end] for name, array in columns.items()},
            **settings,  # pyright: ignore[reportArgumentType]
        )
        for part, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True))
    ]


def column_shapes(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    """Returns each column's shape at one token position, () or (k,), for the columns of any sample."""
    found: dict[str, tuple[int, ...]] = {}
    for sample in samples:
        for name, values in sample.columns.items():
            found[name] = max(found.get(name, ()), values.shape[1:])
    return found


def build_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], row_len: int) -> TrainRows:
    """Lays samples out with advantages of 0. ``rows`` has their indices; an empty row is padding."""
    shape = (len(rows), row_len)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.zeros(shape, np.int64),
        "positions": np.zeros(shape, np.int64),
        "reach": np.full(shape, row_len, np.int64),
        "sequence_ids": np.zeros(shape, np.int64),
        "labels": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.bool_),
        "generator_logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "loss_weights": np.zeros(shape, np.float32),
        "ptx_weights": np.zeros(shape, np.float32),
        "sample_ids": np.full(shape, NO_SAMPLE, np.int64),
    }
    columns = {
        name: np.full((*shape, *of_token), COLUMNS[name].fill, COLUMNS[name].dtype)
        for name, of_token in column_shapes(samples).items()
    }
    arrays |= columns
    for r, members in enumerate(rows):
        start, sequences = 0, [samples[index] for index in members]
        spans = spans_of(sequences)
        for number, span in enumerate(spans):
            arrays["sequence_ids"][r, start:] = number
            row = {k: a[r] for k, a in arrays.items()}
            start = _lay_out(row, start, sequences[span.sequence], span)
        arrays["positions"][r, start:] = np.arange(row_len - start)
        arrays["sequence_ids"][r, start:] = len(spans)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    of_columns = {name: tensors.pop(name) for name in columns}
    return TrainRows(**tensors, columns=of_columns)


def _lay_out(row: dict[str, np.ndarray], start: int, sample: Sample, span: Span) -> int:
    """Writes a span of a sample into a row from ``start`` on; returns where it ends."""
    whole = np.concatenate([sample.prompt_ids, sample.completion_ids])
    tokens = whole[span.begin : span.end]
    end = start + len(tokens)
    row["tokens"][start:end] = tokens
    row["positions"][start:end] = np.arange(span.begin, span.end)
    row["reach"][start:end] = start + span.reach
    row["labels"][start : end - 1] = tokens[1:]
    if span.is_context:
        return end
    row["sample_ids"][start:end] = sample.sample_id
    predicted = slice(end - 1 - sample.num_predicted, end - 1)
    # A scalar if all tokens are trained, which avoids an array for each sample.
    is_trained = True if sample.sampled is None else sample.sampled[-sample.num_predicted :]
    row["ptx_weights"][predicted] = sample.ptx_weight * is_trained
    if sample.generator_logprobs is not None:
        row["loss_mask"][predicted] = is_trained
        row["loss_weights"][predicted] = sample.loss_weight * is_trained
        row["generator_logprobs"][predicted] = sample.generator_logprobs * is_trained
        where = slice(None) if sample.sampled is None else sample.sampled
        for name, values in sample.columns.items():
            # Behind a shorter list there is nothing.
            places = (where, *(slice(k) for k in values.shape[1:]))
            row[name][predicted][places] = values[where]
    return end
