# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a rank must know to lay out its rows itself, as two tensors of numbers.

With ``prompts.single_rank_load = false`` these travel from rank 0 in place of the rows; the
sequences are fetched from the rollout process (see `rollout/batch_fetch.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.types import RolloutGroup

_NOTHING = -1


def packing_list(
    rows: Sequence[Sequence[int]], samples: Sequence[Sample], num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows as numbers.

    Args:
        rows: For each row the indices of its samples.
        samples: All of the step, each with its ``source``.
        num_entries: Length of the tensors: that of the rank with the most samples.

    Returns:
        [num_entries, 3] int64: row, source and sample id of each sequence, in the order of the
        row; -1 behind the last. And [num_entries] float64: its loss weight.
    """
    where = torch.full((num_entries, 3), _NOTHING, dtype=torch.int64)
    weights = torch.zeros(num_entries, dtype=torch.float64)
    entries = [(row, samples[index]) for row, members in enumerate(rows) for index in members]
    for i, (row, sample) in enumerate(entries):
        assert sample.source >= 0, "a sequence that no rollout process holds"
        where[i] = torch.tensor([row, sample.source, sample.sample_id])
        weights[i] = sample.loss_weight
    return where, weights


def sources_of(where: torch.Tensor) -> list[int]:
    """Positions in the batch of what must be fetched, in the order of the entries."""
    return where[where[:, 0] != _NOTHING][:, 1].tolist()


def rows_from(
    where: torch.Tensor,
    weights: torch.Tensor,
    fetched: Sequence[RolloutGroup],
    *,
    num_rows: int,
    row_len: int,
) -> TrainRows:
    """Lays out what was fetched, as rank 0 would have.

    Args:
        where: See :func:`packing_list`.
        weights: See there.
        fetched: One rollout each, in the order of :func:`sources_of`.
        num_rows: Of this rank.
        row_len: ``training.seq_len``.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    samples = []
    for i, group in enumerate(fetched):
        (rollout,) = group.rollouts
        rows[int(where[i, 0])].append(i)
        samples.append(
            Sample(
                rollout.prompt_ids,
                rollout.completion_ids,
                np.asarray(rollout.generator_logprobs),
                sample_id=int(where[i, 2]),
                loss_weight=float(weights[i]),
                sampled=rollout.sampled,
            )
        )
    return build_rows(samples, rows, row_len)
