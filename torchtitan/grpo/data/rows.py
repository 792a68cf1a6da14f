# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The packed rows that a step trains on.

A row is aligned to the *predicted* token: at position ``t`` it holds the input token ``t``, and
the label, mask, logprob, weight and advantage of token ``t + 1``. Only the sample id stands on
all tokens of its sample.

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

from torchtitan.grpo.types import TopTokens

NO_SAMPLE = -1
"""Sample id of padding and of supervised sequences in ``TrainRows.sample_ids``."""

NO_TOKEN = -1
"""Token id in ``TrainRows.teacher_top_ids`` where no teacher has rated a trained token."""


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
        sampled: [completion_len] bool, True for the tokens of a rollout that are trained; None
            if all are. The other tokens, which an environment inserted, are only context.
        source: Position of a rollout among all rollouts of its batch.
        part: Which of the rollout's sequences it is.
        teacher_kl: [completion_len] float32, the student's logprob minus the teacher's; see
            `losses/distillation.py`. None if no teacher has rated the rollout.
        teacher_top: The teacher's most likely tokens in the place of each completion token. None
            without ``teacher.top_k``, and if no teacher has rated the rollout.
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
    teacher_kl: np.ndarray | None = None
    teacher_top: TopTokens | None = None

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
    """Packed rows, as the model and the loss take them.

    Attributes:
        tokens: [rows, seq] int64.
        positions: [rows, seq] int64, restarting at 0 with each sequence.
        sequence_ids: [rows, seq] int64, one id for each sequence of a row, padding included.
        labels: [rows, seq] int64, the next token of the same sequence, 0 at its end.
        loss_mask: [rows, seq] bool, True where the label is a sampled token of a rollout.
        generator_logprobs: [rows, seq] float32, of the label, 0 where not trained.
        advantages: [rows, seq] float32, of the label; 0 where not trained. All are 0 until
            :meth:`with_advantages` fills them in.
        loss_weights: [rows, seq] float32, weight of the label's loss in the global loss; 0
            where not trained. The denominators are those of the whole optimizer step, so that
            sums over microbatches and ranks need no further division.
        ptx_weights: [rows, seq] float32, weight of supervised completion tokens,
            ``grpo.ptx_coef`` included; 0 elsewhere.
        sample_ids: [rows, seq] int64, index in the step's table of samples, on all tokens
            of a rollout; :data:`NO_SAMPLE` elsewhere.
        teacher_kl: [rows, seq] float32, of the label, the student's logprob minus the teacher's at
            sampling time; 0 where not trained, and everywhere without a teacher, which is the
            default.
        teacher_top_ids: [rows, seq, k] int32, the tokens that are most likely under the teacher in the
            place of the label; :data:`NO_TOKEN` where not trained or not rated. None without
            ``teacher.top_k``.
        teacher_top_logprobs: [rows, seq, k] float32, the teacher's logprobs of these tokens; 0 where
            there are none. None without ``teacher.top_k``.
        host_mask: [rows, seq] bool, :attr:`scored` in host memory, wherever the other tensors are:
            the host can count these tokens without waiting for a device. By default it is computed.
        host_sequence_ids: [rows, seq] int64, :attr:`sequence_ids` in host memory likewise.
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
    teacher_kl: torch.Tensor = None  # pyright: ignore[reportAssignmentType]
    teacher_top_ids: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    host_mask: torch.Tensor = None  # pyright: ignore[reportAssignmentType]
    host_sequence_ids: torch.Tensor = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.teacher_kl is None:
            object.__setattr__(self, "teacher_kl", torch.zeros_like(self.generator_logprobs))
        if self.host_mask is None:
            object.__setattr__(self, "host_mask", self.scored.cpu())
        if self.host_sequence_ids is None:
            object.__setattr__(self, "host_sequence_ids", self.sequence_ids.cpu())

    @property
    def scored(self) -> torch.Tensor:
        """[rows, seq] bool, True where the loss uses the label's logprob."""
        return self.loss_mask | (self.ptx_weights != 0)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "TrainRows":
        return TrainRows(
            **{
                name: tensor if name.startswith("host_") else tensor.to(device, non_blocking=True)
                for name, tensor in self.tensors().items()
            }
        )

    def microbatches(self, size: int) -> list["TrainRows"]:
        """Splits into consecutive microbatches of ``size`` rows."""
        split = {name: tensor.split(size) for name, tensor in self.tensors().items()}
        return [
            TrainRows(**dict(zip(split, parts, strict=True)))
            for parts in zip(*split.values(), strict=True)
        ]

    def select(self, rows: slice) -> "TrainRows":
        """Returns some of the rows, as views."""
        return TrainRows(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def with_top_k(self, top_k: int) -> "TrainRows":
        """Returns these rows with ``teacher.top_k`` tokens of the teacher, or without any if it is 0.

        A batch in which no teacher has rated a rollout has none: then no token is rated.

        Raises:
            ValueError: If the rollouts have another number of them.
        """
        if top_k == 0:
            return replace(self, teacher_top_ids=None, teacher_top_logprobs=None)
        shape = (*self.tokens.shape, top_k)
        if self.teacher_top_ids is None:
            nowhere = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=self.tokens.device)
            zeros = torch.zeros(shape, device=self.tokens.device)
            return replace(self, teacher_top_ids=nowhere, teacher_top_logprobs=zeros)
        if self.teacher_top_ids.shape != shape:
            raise ValueError(
                f"teacher.top_k ({top_k}) must be the number of tokens that the teacher has rated at "
                f"each position of the rollouts, got {self.teacher_top_ids.shape[-1]}. Set it to that."
            )
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that there are, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_advantages(self, advantages: np.ndarray) -> "TrainRows":
        """Returns these rows with the advantage of its sample at each trained token.

        Args:
            advantages: [samples] float, indexed as the step's table of samples.
        """
        # NO_SAMPLE, which is -1, looks up the additional entry at the end.
        table = torch.from_numpy(np.append(advantages, 0.0).astype(np.float32))
        # A copy that blocks would wait for the optimizer step before this batch.
        looked_up = table.to(self.sample_ids.device, non_blocking=True)[self.sample_ids]
        return replace(self, advantages=torch.where(self.loss_mask, looked_up, 0.0))


def top_k_of(samples: Sequence[Sample]) -> int:
    """Returns the number of the teacher's tokens at each position; 0 if no sample has any.

    Raises:
        ValueError: If it differs between samples.
    """
    found = {sample.teacher_top.ids.shape[1] for sample in samples if sample.teacher_top}
    if len(found) > 1:
        raise ValueError(
            "All rollouts of a batch must have the same number of a teacher's most likely tokens at "
            f"each position (teacher.top_k), got {sorted(found)}."
        )
    return found.pop() if found else 0


def build_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], row_len: int) -> TrainRows:
    """Lays samples out in rows, with advantages of 0.

    Args:
        samples: All samples of the step.
        rows: For each row, the indices of its samples; an empty row is all padding.
        row_len: Number of tokens of a row.
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
        "teacher_kl": np.zeros(shape, np.float32),
    }
    if top_k := top_k_of(samples):
        arrays["teacher_top_ids"] = np.full((*shape, top_k), NO_TOKEN, np.int32)
        arrays["teacher_top_logprobs"] = np.zeros((*shape, top_k), np.float32)
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
        # A scalar if all tokens are trained, which avoids an array for each sample.
        is_trained = True if sample.sampled is None else sample.sampled
        row["loss_mask"][predicted] = is_trained
        row["loss_weights"][predicted] = sample.loss_weight * is_trained
        row["generator_logprobs"][predicted] = sample.generator_logprobs * is_trained
        if sample.teacher_kl is not None:
            row["teacher_kl"][predicted] = sample.teacher_kl * is_trained
        if sample.teacher_top is not None:
            top = sample.teacher_top
            where = slice(None) if sample.sampled is None else sample.sampled
            row["teacher_top_ids"][predicted][where] = top.ids[where]
            row["teacher_top_logprobs"][predicted][where] = top.logprobs[where]
    return end
