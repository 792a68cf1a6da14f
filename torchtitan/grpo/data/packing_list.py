# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The packing list of a rank: which sequences stand in which of its rows, as two tensors.

With ``prompts.single_rank_load = false`` rank 0 sends each rank its packing list in place of the
rows. The rank fetches the sequences from the rollout process and lays out the rows itself (see `rollout/batch_fetch.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from torchtitan.grpo.data.ratings import teacher_kl
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.types import RolloutGroup

_NOTHING = -1


def packing_list(
    rows: Sequence[Sequence[int]], samples: Sequence[Sample], num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the packing list of a rank.

    Args:
        rows: For each row of the rank, the indices of its samples.
        samples: All samples of the plan, each with its ``source``.
        num_entries: Length of the tensors: the largest number of samples of any rank.

    Returns:
        A tensor [num_entries, 3] int64 with the row, source and sample id of each sequence, in
        the order of the rows, and -1 in the entries behind the last sequence. And a tensor
        [num_entries] float64 with the loss weight of each sequence.
    """
    where = torch.full((num_entries, 3), _NOTHING, dtype=torch.int64)
    weights = torch.zeros(num_entries, dtype=torch.float64)
    entries = [(row, samples[index]) for row, members in enumerate(rows) for index in members]
    for i, (row, sample) in enumerate(entries):
        assert sample.source >= 0, (
            "supervised sequences cannot be fetched: the rollout process does not hold them"
        )
        where[i] = torch.tensor([row, sample.source, sample.sample_id])
        weights[i] = sample.loss_weight
    return where, weights


def sources_of(where: torch.Tensor) -> list[int]:
    """Returns the positions in the batch of the rollouts to fetch, in the order of the list."""
    return where[where[:, 0] != _NOTHING][:, 1].tolist()


def rows_from(
    where: torch.Tensor,
    weights: torch.Tensor,
    fetched: Sequence[RolloutGroup],
    *,
    num_rows: int,
    row_len: int,
) -> TrainRows:
    """Lays out fetched rollouts in the rows that rank 0 would have sent.

    Args:
        where: The first tensor of :func:`packing_list`.
        weights: The second tensor of :func:`packing_list`.
        fetched: Groups of one rollout each, in the order of :func:`sources_of`.
        num_rows: Number of rows of this rank.
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
                teacher_kl=teacher_kl(rollout),
            )
        )
    return build_rows(samples, rows, row_len)
