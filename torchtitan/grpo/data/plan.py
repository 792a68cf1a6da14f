# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From groups of rollouts to each rank's rows. Pure: the plan is made on rank 0 alone.

Invariants: every sample stands in one row of one minibatch; all samples of a group stand
in the same minibatch; every rank has the same number of rows in every minibatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.packing import deal_rows, pack_rows, rows_per_rank, split_evenly
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.losses.advantages import informative_samples
from torchtitan.grpo.losses.aggregation import AggregationKind, token_weights
from torchtitan.grpo.losses.reward_shaping import shape_rewards
from torchtitan.grpo.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class SampleTable:
    """What advantages are computed from: all samples of a step, on every rank.

    Attributes:
        rewards: [samples] float64, shaped.
        group_ids: [samples] int64.
        completion_lengths: [samples] int64, in tokens.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    completion_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, chosen: np.ndarray) -> "SampleTable":
        """The samples of a mask or of indices."""
        return SampleTable(
            self.rewards[chosen], self.group_ids[chosen], self.completion_lengths[chosen]
        )


@dataclass(frozen=True)
class StepPlan:
    """One batch's work.

    Attributes:
        rows_of_rank: For each data-parallel rank its rows, ``num_minibatches`` times the
            same number, minibatch after minibatch.
        minibatch_tokens: For each minibatch, which is one optimizer step of an epoch, the
            tokens that its loss is made of, over all ranks: completion tokens of rollouts,
            and supervised ones. With 0 there is nothing to learn from.
        samples: The table that ``sample_ids`` index.
        num_trained_tokens: Completion tokens of rollouts, over all ranks and minibatches.
        num_tokens: Prompt and completion tokens, supervised ones included, padding left out.
        metrics: What the plan itself knows, staleness for one.
    """

    rows_of_rank: list[TrainRows]
    minibatch_tokens: list[int]
    samples: SampleTable
    num_trained_tokens: int
    num_tokens: int
    metrics: dict[str, float]

    @property
    def num_minibatches(self) -> int:
        return len(self.minibatch_tokens)


def plan_step(
    groups: Sequence[RolloutGroup],
    config: GRPO,
    *,
    version: int,
    num_ranks: int,
    row_len: int,
    local_batch_size: int,
    max_new_tokens: int,
    ptx: Sequence[Sample] = (),
) -> StepPlan:
    """Shapes rewards, cuts the batch into minibatches, weighs, packs and deals.

    Rollouts without a reward are left out. Where every group is left out
    (``grpo.filter_zero_advantage``), the rows are padding and no token is trained.

    Args:
        groups: All groups of the step.
        config: ``[grpo]``.
        version: Batches trained on so far; the age of a sample counts from here.
        num_ranks: Data-parallel degree.
        row_len: ``training.seq_len``.
        local_batch_size: Rows of a microbatch.
        max_new_tokens: ``rollout.max_new_tokens``.
        ptx: Supervised sequences to mix in; their weights are set here.
    """
    scored = [(g.group_id, r) for g in groups for r in g.rollouts if r.reward is not None]
    table = _table(scored, config, max_new_tokens)
    kept = np.ones(len(table), np.bool_)
    if config.filter_zero_advantage:
        kept = informative_samples(table.rewards, table.group_ids)
    rollouts = [r for (_, r), keep in zip(scored, kept, strict=True) if keep]
    metrics = _staleness([r for _, r in scored], version)
    metrics["data/filtered_groups_fraction"] = _fraction_lost(table.group_ids, kept)
    table = table.take(kept)

    num_minibatches = config.num_minibatches
    members = _minibatches_of(rollouts, table.group_ids, num_minibatches)
    constant_length = config.aggregation_length or max_new_tokens
    ptx_parts = split_evenly([s.num_tokens for s in ptx], num_minibatches)
    minibatches = [
        _weighted(rollouts, indices, table, config.aggregation, constant_length)
        + _weighted_ptx([ptx[i] for i in part], config.ptx_coef)
        for indices, part in zip(members, ptx_parts, strict=True)
    ]
    rows_of_rank = _lay_out(minibatches, num_ranks, row_len, local_batch_size)
    num_tokens = sum(s.num_tokens for samples in minibatches for s in samples)
    capacity = num_ranks * rows_of_rank[0].num_rows * row_len
    return StepPlan(
        rows_of_rank=rows_of_rank,
        minibatch_tokens=[_num_learned(samples) for samples in minibatches],
        samples=table,
        num_trained_tokens=int(table.completion_lengths.sum()),
        num_tokens=num_tokens,
        metrics=metrics | {"data/padding_fraction": 1 - num_tokens / capacity},
    )


def epoch_order(num_minibatches: int, epoch: int) -> list[int]:
    """The order in which an epoch goes through a batch's minibatches.

    Each epoch starts one further on, so that the same minibatch is not always the one that
    the policy has moved least (or most) for. The same on every rank and in every run.
    """
    return [(epoch + i) % num_minibatches for i in range(num_minibatches)]


def _table(scored: Sequence[tuple[int, Rollout]], config: GRPO, max_new_tokens: int) -> SampleTable:
    lengths = np.array([len(r.completion_ids) for _, r in scored], dtype=np.int64)
    rewards = shape_rewards(
        np.array([r.reward for _, r in scored], dtype=np.float64),
        lengths,
        positive_scale=config.reward_positive_scale,
        negative_scale=config.reward_negative_scale,
        overlong_buffer=config.overlong_buffer,
        overlong_penalty=config.overlong_penalty,
        max_new_tokens=max_new_tokens,
    )
    return SampleTable(rewards, np.array([g for g, _ in scored], dtype=np.int64), lengths)


def _fraction_lost(group_ids: np.ndarray, kept: np.ndarray) -> float:
    num_groups = len(np.unique(group_ids))
    return 1 - len(np.unique(group_ids[kept])) / num_groups if num_groups else 0.0


def _minibatches_of(
    rollouts: Sequence[Rollout], group_ids: np.ndarray, num_minibatches: int
) -> list[list[int]]:
    """Indices of each minibatch's rollouts: whole groups, tokens balanced."""
    unique, member_of = np.unique(group_ids, return_inverse=True)
    tokens = [0] * len(unique)
    for rollout, group in zip(rollouts, member_of, strict=True):
        tokens[group] += len(rollout.prompt_ids) + len(rollout.completion_ids)
    parts = split_evenly(tokens, num_minibatches)
    return [np.flatnonzero(np.isin(member_of, part)).tolist() for part in parts]


def _weighted(
    rollouts: Sequence[Rollout],
    indices: list[int],
    table: SampleTable,
    aggregation: AggregationKind,
    constant_length: int,
) -> list[Sample]:
    """The rollouts of one minibatch, with weights whose denominators are over it alone."""
    lengths = table.completion_lengths[indices]
    weights = token_weights(lengths, kind=aggregation, constant_length=constant_length)
    return [
        Sample(
            rollouts[i].prompt_ids,
            rollouts[i].completion_ids,
            rollouts[i].generator_logprobs,
            sample_id=i,
            loss_weight=float(weight),
        )
        for i, weight in zip(indices, weights, strict=True)
    ]


def _weighted_ptx(ptx: list[Sample], coef: float) -> list[Sample]:
    num_predicted = sum(sample.num_predicted for sample in ptx)
    return [replace(sample, ptx_weight=coef / num_predicted) for sample in ptx]


def _num_learned(samples: Sequence[Sample]) -> int:
    """Tokens that count in the loss; supervised ones do not with ``grpo.ptx_coef = 0``."""
    return sum(s.num_predicted for s in samples if s.loss_weight > 0 or s.ptx_weight > 0)


def _lay_out(
    minibatches: Sequence[Sequence[Sample]], num_ranks: int, row_len: int, local_batch_size: int
) -> list[TrainRows]:
    """Packs each minibatch into rows of its own, as many on each rank and in each minibatch."""
    packed = [pack_rows([s.num_tokens for s in samples], row_len) for samples in minibatches]
    per_rank = rows_per_rank(max(len(rows) for rows in packed), num_ranks, local_batch_size)
    all_samples = [sample for samples in minibatches for sample in samples]
    rows_of_rank: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    offset = 0
    for samples, rows in zip(minibatches, packed, strict=True):
        row_tokens = [sum(samples[i].num_tokens for i in row) for row in rows]
        for rank, dealt in enumerate(deal_rows(row_tokens, num_ranks, per_rank)):
            rows_of_rank[rank] += [
                [offset + i for i in rows[row]] if row is not None else [] for row in dealt
            ]
        offset += len(samples)
    return [build_rows(all_samples, rows, row_len) for rows in rows_of_rank]


def _staleness(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest_version for rollout in rollouts]
    mixed = [len({segment.version for segment in rollout.segments}) > 1 for rollout in rollouts]
    return {
        "staleness/mixed_version_fraction": float(np.mean(mixed)) if mixed else 0.0,
        "staleness/mean_steps": float(np.mean(ages)) if ages else 0.0,
        "staleness/max_steps": float(max(ages, default=0)),
    }
