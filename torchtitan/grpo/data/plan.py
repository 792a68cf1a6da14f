# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From groups of rollouts to each rank's rows. Pure: the plan is made on rank 0 alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.data.packing import deal_rows, pack_rows
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.losses.advantages import group_normalised_advantages
from torchtitan.grpo.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class StepPlan:
    """One step's work.

    Attributes:
        rows_of_rank: For each data-parallel rank its rows; the same number for each.
        num_trained_tokens: Over all ranks; the loss is divided by it.
        num_tokens: Prompt and completion tokens over all ranks, padding left out.
        metrics: What the plan itself knows, staleness for one.
    """

    rows_of_rank: list[TrainRows]
    num_trained_tokens: int
    num_tokens: int
    metrics: dict[str, float]


def plan_step(
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    num_ranks: int,
    row_len: int,
    local_batch_size: int,
    advantage_eps: float,
) -> StepPlan:
    """Computes advantages, packs all samples into rows, and deals the rows to the ranks.

    Args:
        groups: All groups of the step.
        version: Optimizer steps taken so far; the age of a sample counts from here.
        num_ranks: Data-parallel degree.
        row_len: ``training.seq_len``.
        local_batch_size: Rows of a microbatch.
        advantage_eps: See :func:`group_normalised_advantages`.
    """
    rollouts = [(g.group_id, r) for g in groups for r in g.rollouts if r.reward is not None]
    samples = _samples(rollouts, advantage_eps)
    packed = pack_rows([s.num_tokens for s in samples], row_len)
    row_tokens = [sum(samples[i].num_tokens for i in row) for row in packed]
    dealt = deal_rows(row_tokens, num_ranks, local_batch_size)
    num_tokens = sum(row_tokens)
    num_rows = sum(len(rows) for rows in dealt)
    return StepPlan(
        rows_of_rank=[
            build_rows(samples, [packed[r] if r is not None else [] for r in rows], row_len)
            for rows in dealt
        ],
        num_trained_tokens=sum(len(s.completion_ids) for s in samples),
        num_tokens=num_tokens,
        metrics=_staleness([rollout for _, rollout in rollouts], version)
        | {"data/padding_fraction": 1 - num_tokens / (num_rows * row_len)},
    )


def _samples(rollouts: Sequence[tuple[int, Rollout]], advantage_eps: float) -> list[Sample]:
    advantages = group_normalised_advantages(
        np.array([rollout.reward for _, rollout in rollouts], dtype=np.float64),
        np.array([group_id for group_id, _ in rollouts], dtype=np.int64),
        advantage_eps,
    )
    return [
        Sample(r.prompt_ids, r.completion_ids, r.generator_logprobs, float(advantage))
        for (_, r), advantage in zip(rollouts, advantages, strict=True)
    ]


def _staleness(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest_version for rollout in rollouts]
    mixed = [len({segment.version for segment in rollout.segments}) > 1 for rollout in rollouts]
    return {
        "staleness/mixed_version_fraction": float(np.mean(mixed)) if mixed else 0.0,
        "staleness/mean_steps": float(np.mean(ages)) if ages else 0.0,
        "staleness/max_steps": float(max(ages, default=0)),
    }
