# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rows that a step trains on.

Everything in a row is aligned to the *predicted* token: at position ``t`` the row holds
the input token ``t``, and the label, mask, logprob and advantage of token ``t + 1``.

Example: prompt ``[5, 6]``, completion ``[7, 8]``, row length 6::

    tokens        5 6 7 8 0 0
    positions     0 1 2 3 0 1
    sequence_ids  0 0 0 0 1 1      (padding is a sequence of its own)
    labels        6 7 8 0 0 0
    loss_mask     0 1 1 0 0 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True)
class Sample:
    """One sequence to train on.

    Attributes:
        prompt_ids: [prompt_len] int32.
        completion_ids: [completion_len] int32.
        generator_logprobs: [completion_len] float32.
        advantage: Of every completion token.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    generator_logprobs: np.ndarray
    advantage: float

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TrainRows:
    """Packed rows, as seen by the model and the loss.

    Attributes:
        tokens: [rows, seq] int64.
        positions: [rows, seq] int64, restarting at 0 with each sequence.
        sequence_ids: [rows, seq] int64, one id per sequence of a row, padding included.
        labels: [rows, seq] int64, the next token of the same sequence, 0 at its end.
        loss_mask: [rows, seq] bool, True where the label is a completion token.
        generator_logprobs: [rows, seq] float32, of the label, 0 where not trained.
        advantages: [rows, seq] float32, of the label, 0 where not trained.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequence_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor

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


def build_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], row_len: int) -> TrainRows:
    """Lays samples out in rows.

    Args:
        samples: All samples of the step.
        rows: For each row the indices of its samples; an empty row is all padding.
        row_len: Tokens of a row.
    """
    shape = (len(rows), row_len)
    ints = {
        name: np.zeros(shape, np.int64)
        for name in ("tokens", "positions", "sequence_ids", "labels")
    }
    mask = np.zeros(shape, np.bool_)
    floats = {name: np.zeros(shape, np.float32) for name in ("generator_logprobs", "advantages")}
    for r, members in enumerate(rows):
        start = 0
        for sequence_id, index in enumerate(members):
            sample = samples[index]
            tokens = np.concatenate([sample.prompt_ids, sample.completion_ids])
            end = start + len(tokens)
            ints["tokens"][r, start:end] = tokens
            ints["positions"][r, start:end] = np.arange(len(tokens))
            ints["sequence_ids"][r, start:end] = sequence_id
            ints["labels"][r, start : end - 1] = tokens[1:]
            trained = slice(end - 1 - len(sample.completion_ids), end - 1)
            mask[r, trained] = True
            floats["generator_logprobs"][r, trained] = sample.generator_logprobs
            floats["advantages"][r, trained] = sample.advantage
            start = end
        ints["positions"][r, start:] = np.arange(row_len - start)
        ints["sequence_ids"][r, start:] = len(members)
    arrays = {**ints, "loss_mask": mask, **floats}
    return TrainRows(**{name: torch.from_numpy(array) for name, array in arrays.items()})
