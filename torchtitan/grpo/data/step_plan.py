# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Plans which rows each rank trains on, from groups of rollouts. Only rank 0 plans.

Invariants: every sample stands in one row of one minibatch. All samples of a group stand in the
same minibatch, but possibly on several ranks: advantages are computed from the table of
samples. Every rank has the same number of rows in every minibatch, a multiple of ``row_bucket``
microbatches if that is above 0.
The layout of the rows changes neither which tokens are trained nor how much they weigh.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import SequenceCost
from torchtitan.grpo.data.layout import Layout, lay_out
from torchtitan.grpo.data.packing import split_evenly
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows, column_shapes, sequences_of
from torchtitan.grpo.data.shared_context import NO_GROUP, Span, num_computed, spans_of
from torchtitan.grpo.losses.advantages import (
    informative_samples,
    num_equal_groups,
    shape_rewards,
)
from torchtitan.grpo.losses.aggregation import token_weights, weight_mass
from torchtitan.grpo.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class SampleTable:
    """All samples of a step, from which every rank computes the advantages; fields are [samples].

    ``rewards`` are shaped rewards in float64, other fields int64. ``completion_lengths`` count trained tokens.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    completion_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def are_rewards_equal(self) -> bool:
        """Whether the rewards within each group are equal."""
        return num_equal_groups(self.rewards, self.group_ids) == len(np.unique(self.group_ids))

    def are_logged(self, num_groups: int) -> np.ndarray:
        """Returns for each sample whether it is of the first groups, and False behind them for NO_SAMPLE.

        These are at least those of ``samples.jsonl``, whose groups are the first ones of the whole batch.
        """
        first = np.unique(self.group_ids)[:num_groups]
        return np.append(np.isin(self.group_ids, first), False)

    def take(self, chosen: np.ndarray) -> "SampleTable":
        return SampleTable(
            self.rewards[chosen], self.group_ids[chosen], self.completion_lengths[chosen]
        )


@dataclass(frozen=True)
class StepPlan:
    """The plan of one batch, or of one part of it. Counts are over all ranks and minibatches.

    Attributes:
        sequences: Rollouts and supervised sequences.
        layout: For each data-parallel rank its rows, and for each row the indices of its
            sequences. The minibatches follow each other, with the same number of rows each.
        minibatch_tokens: For each minibatch, which is one optimizer step of an epoch, the
            completion tokens with a loss, supervised ones included. With 0 there is no gradient.
        samples: The table that ``sample_ids`` index.
        mass: Total mass of the weights of rollouts; see :func:`aggregation.weight_mass`.
        num_trained_tokens: Completion tokens of rollouts.
        num_tokens: Prompt and completion tokens of all sequences, with supervised ones and
            without padding. Each sequence counts the context that it shares.
        metrics: ``data/max_over_mean_cost``, among others, is the cost of the costliest rank
            relative to the mean; minibatches are weighted by cost.
        logged_groups: Of so many groups, ranks tell rank 0 what they compute for each trained token.
    """

    sequences: Sequence[Sample]
    layout: list[list[list[int]]]
    row_len: int
    minibatch_tokens: list[int]
    samples: SampleTable
    mass: int
    num_trained_tokens: int
    num_tokens: int
    metrics: dict[str, float]
    logged_groups: int = 0

    @functools.cached_property
    def rows_of_rank(self) -> list[TrainRows]:
        return [build_rows(self.sequences, rows, self.row_len) for rows in self.layout]

    @functools.cached_property
    def column_shapes(self) -> dict[str, tuple[int, ...]]:
        return column_shapes(self.sequences)

    @functools.cached_property
    def spans(self) -> list[list[list[Span]]]:
        """The spans of each row of each rank, as in ``layout``."""
        return [
            [spans_of([self.sequences[i] for i in row]) for row in rows] for rows in self.layout
        ]

    @functools.cached_property
    def num_computed(self) -> int:
        """Number of tokens that the model computes. Unlike in ``num_tokens``, shared tokens count once."""
        return sum(num_computed(row) for rows in self.spans for row in rows)

    @functools.cached_property
    def num_logged(self) -> list[int]:
        """For each data-parallel rank the number of trained tokens in ``logged``."""
        return [sum(sequence.num_trained for sequence in rank) for rank in self.logged]

    @property
    def logged(self) -> list[list[Sample]]:
        """For each data-parallel rank its sequences of logged groups, in the order of its rows."""
        are_logged = self.samples.are_logged(self.logged_groups)
        of_ranks = [
            [
                self.sequences[row[span.sequence]]
                for row, spans in zip(rows, of_rows, strict=True)
                for span in spans
                if not span.is_context
            ]
            for rows, of_rows in zip(self.layout, self.spans, strict=True)
        ]
        return [[one for one in rank if are_logged[one.sample_id]] for rank in of_ranks]

    def by_source(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Divides values [2, tokens] of logged tokens of all ranks among rollouts, by ``Sample.source``."""
        parts: dict[tuple[int, int], np.ndarray] = {}
        for one in (one for rank in self.logged for one in rank):
            parts[one.source, one.part], values = np.split(values, [one.num_trained], axis=1)
        found: dict[int, np.ndarray] = {}
        for source, part in sorted(parts):
            former = found.get(source, np.empty((2, 0)))
            found[source] = np.concatenate([former, parts[source, part]], axis=1)
        return found

    @property
    def num_minibatches(self) -> int:
        return len(self.minibatch_tokens)

    @property
    def capacity(self) -> int:
        return len(self.layout) * len(self.layout[0]) * self.row_len


def plan_step(
    groups: Sequence[RolloutGroup],
    config: GRPO,
    *,
    num_ranks: int,
    row_len: int,
    local_batch_size: int,
    max_new_tokens: int,
    balance: bool,
    cost: SequenceCost,
    row_bucket: int,
    ptx: Sequence[Sample] = (),
    shares_contexts: bool = False,
    knows_tokens: bool = True,
) -> StepPlan:
    """Plans a batch: shaped rewards, minibatches, loss weights, ranks and rows.

    Rollouts without a reward are left out. If every group is left out
    (``grpo.filter_zero_advantage``), the rows are padding and no token is trained. The plan sets the
    weights of ``ptx``, supervised sequences to mix in. With ``shares_contexts``, sequences of a group share
    their contexts. Without ``knows_tokens``, token ids are zeros and cannot be compared. Then only
    sequences share that begin with the group's prompt, which is one array for all of them.
    """
    everything = [(g.group_id, r) for g in groups for r in g.rollouts]
    sources = [i for i, (_, r) in enumerate(everything) if r.reward is not None]
    scored = [everything[i] for i in sources]
    table = _table(scored, config, max_new_tokens)
    kept = np.ones(len(table), np.bool_)
    if config.filter_zero_advantage:
        kept = informative_samples(table.rewards, table.group_ids)
    rollouts = [r for (_, r), keep in zip(scored, kept, strict=True) if keep]
    sources = [source for source, keep in zip(sources, kept, strict=True) if keep]
    metrics = _metrics_of_groups(table, kept)
    table = table.take(kept)
    learned = _weighted_minibatches(rollouts, sources, table, config, max_new_tokens)
    if shares_contexts:
        learned = [_in_groups(samples, rollouts, table, knows_tokens) for samples in learned]
    minibatches = [a + b for a, b in zip(learned, _ptx_of_minibatches(ptx, config), strict=True)]
    shape = Layout(num_ranks, row_len, local_batch_size, row_bucket, balance, cost)
    layout, layout_metrics = lay_out(minibatches, shape)
    return StepPlan(
        sequences=[sample for samples in minibatches for sample in samples],
        layout=layout,
        row_len=row_len,
        minibatch_tokens=[_num_learned(samples) for samples in minibatches],
        samples=table,
        mass=weight_mass(table.completion_lengths, kind=config.aggregation),
        num_trained_tokens=int(table.completion_lengths.sum()),
        num_tokens=sum(s.num_tokens for samples in minibatches for s in samples),
        metrics=metrics | layout_metrics,
    )


def _in_groups(
    samples: Sequence[Sample],
    rollouts: Sequence[Rollout],
    table: SampleTable,
    knows_tokens: bool,
) -> list[Sample]:
    group_ids, grouped = table.group_ids.tolist(), []
    prompts: dict[int, np.ndarray] = {}  # of the first rollout of each group
    for group, rollout in zip(group_ids, rollouts, strict=True):
        prompts.setdefault(group, rollout.prompt_ids)
    for sample in samples:
        group = group_ids[sample.sample_id]
        shares = knows_tokens or sample.prompt_ids is prompts[group]
        grouped.append(replace(sample, group=group if shares else NO_GROUP))
    return grouped


def _metrics_of_groups(table: SampleTable, kept: np.ndarray) -> dict[str, float]:
    num_scored, num_kept = (len(np.unique(ids)) for ids in (table.group_ids, table.group_ids[kept]))
    return {
        "reward/equal_groups": float(num_equal_groups(table.rewards, table.group_ids)),
        "data/filtered_groups_fraction": 1 - num_kept / num_scored if num_scored else 0.0,
    }


def _weighted_minibatches(
    rollouts: Sequence[Rollout],
    sources: Sequence[int],
    table: SampleTable,
    config: GRPO,
    max_new_tokens: int,
) -> list[list[Sample]]:
    minibatches = []
    for indices in _minibatches_of(rollouts, table.group_ids, config.num_minibatches):
        lengths = table.completion_lengths[indices]
        weights = token_weights(lengths, kind=config.aggregation, constant_length=max_new_tokens)
        sequences = (
            sequences_of(rollouts[i], sample_id=i, source=sources[i], loss_weight=float(weight))
            for i, weight in zip(indices, weights, strict=True)
        )
        minibatches.append([sequence for some in sequences for sequence in some])
    return minibatches


def _ptx_of_minibatches(ptx: Sequence[Sample], config: GRPO) -> list[list[Sample]]:
    minibatches = []
    for part in split_evenly([s.num_tokens for s in ptx], config.num_minibatches):
        num_trained = sum(ptx[i].num_trained for i in part)
        minibatches.append(
            [replace(ptx[i], ptx_weight=config.ptx_coef / num_trained) for i in part]
        )
    return minibatches


def epoch_order(num_minibatches: int, epoch: int) -> list[int]:
    """Returns the order of a batch's minibatches in an epoch, the same on every rank.

    Each epoch starts with the next minibatch, so that none is always the first or the last one.
    """
    return [(epoch + i) % num_minibatches for i in range(num_minibatches)]


def _table(scored: Sequence[tuple[int, Rollout]], config: GRPO, max_new_tokens: int) -> SampleTable:
    rewards = shape_rewards(
        np.array([r.reward for _, r in scored], dtype=np.float64),
        np.array([r.num_written for _, r in scored], dtype=np.int64),
        overlong_buffer=config.overlong_buffer,
        overlong_penalty=config.overlong_penalty,
        max_new_tokens=max_new_tokens,
    )
    lengths = np.array([r.num_trained for _, r in scored], dtype=np.int64)
    return SampleTable(rewards, np.array([g for g, _ in scored], dtype=np.int64), lengths)


def _minibatches_of(
    rollouts: Sequence[Rollout], group_ids: np.ndarray, num_minibatches: int
) -> list[list[int]]:
    """Divides groups among minibatches, evenly by tokens; returns the indices of each minibatch's rollouts."""
    unique, member_of = np.unique(group_ids, return_inverse=True)
    tokens = [0] * len(unique)
    for rollout, group in zip(rollouts, member_of, strict=True):
        tokens[group] += len(rollout.prompt_ids) + len(rollout.token_ids)
    parts = split_evenly(tokens, num_minibatches)
    return [np.flatnonzero(np.isin(member_of, part)).tolist() for part in parts]


def _num_learned(samples: Sequence[Sample]) -> int:
    """Counts the tokens that have a loss. With ``grpo.ptx_coef = 0``, supervised tokens have none."""
    return sum(s.num_trained for s in samples if s.loss_weight > 0 or s.ptx_weight > 0)
