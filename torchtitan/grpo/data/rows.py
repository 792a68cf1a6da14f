# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rows that a step trains on.

Everything in a row is aligned to the *predicted* token: at position ``t`` the row holds
the input token ``t``, and the label, mask, logprob, weight and advantage of token ``t + 1``.
A sample's id alone stands on all of its tokens.

Example: prompt ``[5, 6]``, completion ``[7, 8]``, both the step's sample 3, row length 6::

    tokens        5 6 7 8 0 0
    positions     0 1 2 3 0 1
    sequence_ids  0 0 0 0 1 1      (padding is a sequence of its own)
    labels        6 7 8 0 0 0
    loss_mask     0 1 1 0 0 0
    sample_ids    3 3 3 3 -1 -1
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

NO_SAMPLE = -1
"""In ``TrainRows.sample_ids``: padding, or a supervised sequence."""


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: a rollout, or a supervised (ptx) sequence.

    Attributes:
        prompt_ids: [prompt_len] int32; a supervised sequence may have none.
        completion_ids: [completion_len] int32.
        generator_logprobs: [completion_len] float32; None on a supervised sequence.
        sample_id: Index in the step's table of samples, or :data:`NO_SAMPLE`.
        loss_weight: Of every trained token of a rollout in the global loss.
        ptx_weight: Of every predicted completion token of a supervised sequence.
        sampled: [completion_len] bool, True where a token of a rollout is trained; None is
            everywhere. The others, which an environment put in, are context alone.
        source: Position of a rollout among all of its batch.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    generator_logprobs: np.ndarray | None
    sample_id: int = NO_SAMPLE
    loss_weight: float = 0.0
    ptx_weight: float = 0.0
    sampled: np.ndarray | None = None
    source: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_predicted(self) -> int:
        """Completion tokens that something comes before: without a prompt, all but the first."""
        return self.num_tokens - max(len(self.prompt_ids), 1)

    @property
    def num_trained(self) -> int:
        """Predicted tokens that count in the loss: those that an environment put in do not."""
        if self.sampled is None:
            return self.num_predicted
        return int(np.count_nonzero(self.sampled[-self.num_predicted :]))


@dataclass(frozen=True)
class TrainRows:
    """Packed rows, as seen by the model and the loss.

    Attributes:
        tokens: [rows, seq] int64.
        positions: [rows, seq] int64, restarting at 0 with each sequence.
        sequence_ids: [rows, seq] int64, one id per sequence of a row, padding included.
        labels: [rows, seq] int64, the next token of the same sequence, 0 at its end.
        loss_mask: [rows, seq] bool, True where the label is a token that a rollout's model wrote.
        generator_logprobs: [rows, seq] float32, of the label, 0 where not trained.
        advantages: [rows, seq] float32, of the label, 0 where not trained, and everywhere
            until :meth:`with_advantages` fills them in.
        loss_weights: [rows, seq] float32, what the label's loss counts in the global loss,
            0 where not trained. Their denominators are those of the whole optimizer step,
            so sums over microbatches and ranks need no further division.
        ptx_weights: [rows, seq] float32, the same for supervised completion tokens,
            ``grpo.ptx_coef`` included; 0 elsewhere.
        sample_ids: [rows, seq] int64, index in the step's table of samples, on all tokens
            of a rollout; :data:`NO_SAMPLE` elsewhere.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequence_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    ptx_weights: torch.Tensor
    sample_ids: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "TrainRows":
        return TrainRows(
            **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        )

    def microbatches(self, size: int) -> list["TrainRows"]:
        """Splits into consecutive microbatches of ``size`` rows."""
        split = {f.name: getattr(self, f.name).split(size) for f in fields(self)}
        return [
            TrainRows(**dict(zip(split, parts, strict=True)))
            for parts in zip(*split.values(), strict=True)
        ]

    def select(self, rows: slice) -> "TrainRows":
        """Returns some of the rows, as views."""
        return TrainRows(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def with_advantages(self, advantages: np.ndarray) -> "TrainRows":
        """These rows with each trained token given its sample's advantage.

        Args:
            advantages: [samples] float, of the step's table of samples.
        """
        # One more entry at the end: NO_SAMPLE looks it up, also where there is no sample.
        table = torch.from_numpy(np.append(advantages, 0.0).astype(np.float32))
        looked_up = table.to(self.sample_ids.device)[self.sample_ids]
        return replace(self, advantages=torch.where(self.loss_mask, looked_up, 0.0))


def build_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], row_len: int) -> TrainRows:
    """Lays samples out in rows; advantages are left at 0.

    Args:
        samples: All samples of the step.
        rows: For each row the indices of its samples; an empty row is all padding.
        row_len: Tokens of a row.
    """
    shape = (len(rows), row_len)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.zeros(shape, np.int64),
        "positions": np.zeros(shape, np.int64),
        "sequence_ids": np.zeros(shape, np.int64),
        "labels": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.bool_),
        "generator_logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "loss_weights": np.zeros(shape, np.float32),
        "ptx_weights": np.zeros(shape, np.float32),
        "sample_ids": np.full(shape, NO_SAMPLE, np.int64),
    }
    for r, members in enumerate(rows):
        start = 0
        for sequence_id, index in enumerate(members):
            arrays["sequence_ids"][r, start:] = sequence_id
            start = _lay_out({k: a[r] for k, a in arrays.items()}, start, samples[index])
        arrays["positions"][r, start:] = np.arange(row_len - start)
        arrays["sequence_ids"][r, start:] = len(members)
    return TrainRows(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _lay_out(row: dict[str, np.ndarray], start: int, sample: Sample) -> int:
    """Writes one sample into a row from ``start`` on; returns where it ends."""
    tokens = np.concatenate([sample.prompt_ids, sample.completion_ids])
    end = start + len(tokens)
    row["tokens"][start:end] = tokens
    row["positions"][start:end] = np.arange(len(tokens))
    row["labels"][start : end - 1] = tokens[1:]
    row["sample_ids"][start:end] = sample.sample_id
    predicted = slice(end - 1 - sample.num_predicted, end - 1)
    row["ptx_weights"][predicted] = sample.ptx_weight
    if sample.generator_logprobs is not None:
        # A scalar where all are trained: nothing is looked at token by token.
        is_trained = True if sample.sampled is None else sample.sampled
        row["loss_mask"][predicted] = is_trained
        row["loss_weights"][predicted] = sample.loss_weight * is_trained
        row["generator_logprobs"][predicted] = sample.generator_logprobs * is_trained
    return end
