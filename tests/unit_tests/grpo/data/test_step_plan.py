"""A plan weighs every sample once, keeps groups whole, and gives ranks equal shares."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import FlopsCost, token_cost
from torchtitan.grpo.data.rows import NO_SAMPLE, Sample
from torchtitan.grpo.data.step_plan import epoch_order, plan_step
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

ROW_LEN = 16


def rollout(reward, length=3, version=7, first=0):
    ids = np.arange(first, first + length, dtype=np.int32)
    return Rollout(
        prompt_ids=np.array([1, 2], np.int32),
        token_ids=ids,
        logprobs=-ids.astype(np.float32),
        segments=(VersionSegment(version, 0, length),),
        finish_reason="stop",
        completion="",
        reward=reward,
        teacher_top_ids=ids[:, None] * np.array([5, 7], np.int32),
        teacher_top_logprobs=-ids[:, None] / np.array([2, 3], np.float32),
    )


def supervised(length):
    return Sample(np.array([1], np.int32), np.arange(length, dtype=np.int32), None)


def plan(groups, config=None, **arguments):
    defaults = {"version": 7, "num_ranks": 1, "row_len": ROW_LEN, "local_batch_size": 1}
    defaults |= {"max_new_tokens": 8, "balance": True, "cost": token_cost, "row_bucket": 1}
    return plan_step(groups, config or GRPO(), **defaults | arguments)


def minibatches_of(made):
    """For each minibatch the rows of all ranks."""
    size = made.rows_of_rank[0].num_rows // made.num_minibatches
    parts = [rows.microbatches(size) for rows in made.rows_of_rank]
    return [[of_rank[m] for of_rank in parts] for m in range(made.num_minibatches)]


def total(rows_of_rank, name):
    return sum(float(getattr(rows, name).double().sum()) for rows in rows_of_rank)


def test_a_plan_counts_tokens_ages_and_leaves_unscored_samples_out():
    groups = [
        RolloutGroup(4, "a", (rollout(1.0, version=6), rollout(0.0), rollout(None)), "u"),
        RolloutGroup(9, "b", (rollout(2.0, 5), rollout(2.0)), "u"),
    ]
    made = plan(groups, num_ranks=2, row_len=10)
    assert made.num_trained_tokens == 3 + 3 + 5 + 3
    assert made.num_tokens == made.num_trained_tokens + 4 * 2
    assert made.metrics["staleness/max_steps"] == 1
    assert made.metrics["staleness/mean_steps"] == 0.25
    assert made.metrics["data/filtered_groups_fraction"] == 0
    assert 0 < made.metrics["data/padding_fraction"] < 1
    assert made.samples.rewards.tolist() == [1, 0, 2, 2]
    assert made.samples.group_ids.tolist() == [4, 4, 9, 9]
    assert made.samples.completion_lengths.tolist() == [3, 3, 5, 3]
    assert sum(int(rows.loss_mask.sum()) for rows in made.rows_of_rank) == 14


def test_tokens_of_an_environment_are_neither_trained_nor_counted():
    masked = replace(rollout(1.0, 5), sampled=np.array([True, False, False, True, True]))
    made = plan([RolloutGroup(0, "", (masked, rollout(0.0, 3)), "")])
    assert made.samples.completion_lengths.tolist() == [3, 3]
    assert (made.num_trained_tokens, made.minibatch_tokens) == (6, [6])
    assert made.num_tokens == 2 * 2 + 5 + 3
    assert total(made.rows_of_rank, "loss_mask") == 6
    assert total(made.rows_of_rank, "loss_weights") == pytest.approx(1)
    # Its logprobs are those of the tokens that it wrote.
    assert total(made.rows_of_rank, "generator_logprobs") == -(0 + 3 + 4) - (0 + 1 + 2)


def test_advantages_found_by_sample_id_are_those_of_the_sample():
    # Completions are told apart by their first token.
    rewards = {0: 1.0, 10: 0.0, 20: 3.0, 30: 5.0}
    rollouts = [rollout(reward, first=first) for first, reward in rewards.items()]
    groups = [
        RolloutGroup(1, "", tuple(rollouts[:2]), ""),
        RolloutGroup(0, "", tuple(rollouts[2:]), ""),
    ]
    made = plan(groups, GRPO(num_minibatches=2))
    table = made.samples
    advantages = compute_advantages(
        table.rewards, table.group_ids, table.completion_lengths, kind="group_mean",
        std="sample", eps=1e-4, length_power=0,
    )  # fmt: skip
    rows = made.rows_of_rank[0].with_advantages(advantages)
    found = dict(
        zip(
            rows.labels[rows.loss_mask].tolist(),
            rows.advantages[rows.loss_mask].tolist(),
            strict=True,
        )
    )
    assert {first: found[first] for first in rewards} == {0: 0.5, 10: -0.5, 20: -1, 30: 1}


def test_minibatches_take_whole_groups_and_even_out_tokens():
    lengths = {0: 8, 1: 7, 2: 2, 3: 1}
    groups = [
        RolloutGroup(g, "", (rollout(1.0, n), rollout(0.0, n)), "") for g, n in lengths.items()
    ]
    first, second = minibatches_of(plan(groups, GRPO(num_minibatches=2)))
    assert total(first, "loss_mask") == total(second, "loss_mask") == 18
    assert {i for rows in first for i in rows.sample_ids.unique().tolist()} == {-1, 0, 1, 6, 7}
    # 18 trained tokens in each.
    assert first[0].loss_weights.max() == pytest.approx(1 / 18)


def test_uninformative_groups_are_filtered_by_their_shaped_rewards():
    groups = [
        RolloutGroup(0, "", (rollout(1.0), rollout(0.0)), ""),
        RolloutGroup(1, "", (rollout(1.0), rollout(1.0)), ""),
        # Told apart by the overlong penalty alone.
        RolloutGroup(2, "", (rollout(1.0, 3), rollout(1.0, 8)), ""),
        RolloutGroup(3, "", (rollout(0.0), rollout(0.0)), ""),
    ]
    config = GRPO(filter_zero_advantage=True, overlong_buffer=4, overlong_penalty=0.5)
    made = plan(groups, config)
    assert made.metrics["data/filtered_groups_fraction"] == 0.5
    assert made.samples.group_ids.tolist() == [0, 0, 2, 2]
    assert made.samples.rewards.tolist() == [1, 0, 1, 0.5]
    assert made.num_trained_tokens == 3 + 3 + 3 + 8
    assert total(made.rows_of_rank, "loss_weights") == pytest.approx(1)


def test_a_batch_of_which_nothing_is_left_still_has_rows():
    groups = [RolloutGroup(g, "", (rollout(1.0), rollout(1.0)), "") for g in range(3)]
    made = plan(
        groups, GRPO(filter_zero_advantage=True, num_minibatches=2), num_ranks=2, local_batch_size=2
    )
    assert [rows.num_rows for rows in made.rows_of_rank] == [4, 4]
    assert (made.num_trained_tokens, made.num_tokens, len(made.samples)) == (0, 0, 0)
    assert made.metrics["data/filtered_groups_fraction"] == 1
    assert made.metrics["staleness/max_steps"] == 0
    for rows in made.rows_of_rank:
        assert not rows.loss_mask.any()
        table = made.samples
        advantages = compute_advantages(
            table.rewards, table.group_ids, table.completion_lengths, kind="batch_norm",
            std="sample", eps=1e-4, length_power=1,
        )  # fmt: skip
        assert not rows.with_advantages(advantages).advantages.any()


def test_supervised_rows_are_spread_and_weigh_their_coefficient_in_each_minibatch():
    groups = [RolloutGroup(g, "", (rollout(1.0), rollout(0.0)), "") for g in range(2)]
    ptx = [supervised(n) for n in (5, 4, 3, 2)]
    config = GRPO(num_minibatches=2, ptx_coef=0.5)
    made = plan(groups, config, ptx=ptx, num_ranks=2)
    for rows_of_rank in minibatches_of(made):
        assert total(rows_of_rank, "ptx_weights") == pytest.approx(0.5)
        assert total(rows_of_rank, "loss_weights") == pytest.approx(1)
        assert sum(int((rows.ptx_weights > 0).sum()) for rows in rows_of_rank) == 7
    assert made.num_trained_tokens == 4 * 3
    assert made.num_tokens == 4 * 5 + 14 + 4


def test_constant_length_weights_use_the_longest_completion_unless_told():
    groups = [RolloutGroup(0, "", (rollout(1.0), rollout(0.0)), "")]
    made = plan(groups, GRPO(aggregation="constant_length"))
    assert made.rows_of_rank[0].loss_weights.max() == pytest.approx(1 / (2 * 8))
    made = plan(groups, GRPO(aggregation="constant_length", aggregation_length=5))
    assert made.rows_of_rank[0].loss_weights.max() == pytest.approx(1 / (2 * 5))


def test_each_minibatch_says_how_many_tokens_it_learns_from():
    groups = [
        RolloutGroup(0, "", (rollout(1.0, 3), rollout(0.0, 5)), ""),
        RolloutGroup(1, "", (rollout(2.0, 4), rollout(2.0, 4)), ""),
    ]
    assert sum(plan(groups, GRPO(num_minibatches=2)).minibatch_tokens) == 16
    # A group that is filtered out leaves a minibatch without anything to learn.
    filtered = GRPO(num_minibatches=2, filter_zero_advantage=True)
    assert sorted(plan(groups, filtered).minibatch_tokens) == [0, 8]
    mix = [supervised(3), supervised(6)]
    made = plan(groups, filtered, ptx=mix)
    for tokens, rows in zip(made.minibatch_tokens, minibatches_of(made), strict=True):
        learned = [(r.loss_weights > 0) | (r.ptx_weights > 0) for r in rows]
        assert tokens == sum(int(mask.sum()) for mask in learned)
    filtered.ptx_coef = 0.0
    assert sorted(plan(groups, filtered, ptx=mix).minibatch_tokens) == [0, 8]


def test_each_epoch_starts_one_minibatch_further_on():
    assert [epoch_order(3, epoch) for epoch in range(4)] == [
        [0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2],
    ]  # fmt: skip
    assert epoch_order(1, 5) == [0]


@st.composite
def batches(draw):
    num_groups = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=num_groups, max_size=num_groups))
    scored = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 1.0]))
    made = st.builds(rollout, scored, st.integers(1, 14))
    return [
        RolloutGroup(10 * g, "", tuple(draw(made) for _ in range(n)), "")
        for g, n in enumerate(sizes)
    ]


layouts = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 3),
        "local_batch_size": st.integers(1, 2),
        "row_bucket": st.integers(1, 3),
        "balance": st.booleans(),
        "cost": st.sampled_from([token_cost, FlopsCost(1.0, 5.0)]),
    }
)


@given(
    batches(),
    st.integers(1, 3),
    layouts,
    st.booleans(),
    st.lists(st.integers(1, 10), max_size=4),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_plans_keep_their_invariants(
    groups, num_minibatches, layout, filtered, ptx_lengths, aggregation
):
    config = GRPO(
        num_minibatches=num_minibatches, filter_zero_advantage=filtered, aggregation=aggregation
    )
    ptx = [supervised(n) for n in ptx_lengths]
    arguments = layout | {"ptx": ptx}
    made = plan(groups, config, **arguments)
    sizes = {rows.num_rows for rows in made.rows_of_rank}
    assert sizes == {made.metrics["data/rows_per_rank"]}
    multiple = num_minibatches * layout["local_batch_size"] * layout["row_bucket"]
    assert sizes.pop() % multiple == 0
    assert made.metrics["data/max_over_mean_cost"] >= 1 - 1e-9
    places = [
        sorted({i for rows in of_rank for i in rows.sample_ids.unique().tolist()} - {NO_SAMPLE})
        for of_rank in minibatches_of(made)
    ]
    # Every sample once, and a group in one minibatch.
    assert sorted(i for place in places for i in place) == list(range(len(made.samples)))
    of_groups = [set(made.samples.group_ids[place].tolist()) for place in places]
    assert sum(len(ids) for ids in of_groups) == len(set(made.samples.group_ids.tolist()))
    # Every token of every sample once.
    counts = np.zeros(len(made.samples), np.int64)
    for rows in made.rows_of_rank:
        ids = rows.sample_ids[rows.loss_mask].numpy()
        np.add.at(counts, ids, 1)
    assert counts.tolist() == made.samples.completion_lengths.tolist()
    for of_rank, place in zip(minibatches_of(made), places, strict=True):
        assert total(of_rank, "loss_weights") == pytest.approx(1 if place else 0, rel=1e-5)
    again = plan(groups, config, **arguments)
    for rows, same in zip(made.rows_of_rank, again.rows_of_rank, strict=True):
        assert all(torch.equal(x, same.tensors()[name]) for name, x in rows.tensors().items())


def trained_tokens(made):
    """What the loss sees, place in the rows aside: one entry a trained or supervised token."""
    seen = []
    for m, of_rank in enumerate(minibatches_of(made)):
        for rows in of_rank:
            where = rows.loss_mask | (rows.ptx_weights > 0)
            columns = [
                rows.sample_ids, rows.positions, rows.tokens, rows.labels,
                rows.generator_logprobs, rows.loss_weights, rows.ptx_weights,
            ]  # fmt: skip
            for name in sorted(rows.columns):
                columns += rows.columns[name].unbind(-1)
            values = torch.stack([column[where].double() for column in columns], dim=1)
            seen += [(m, *token) for token in values.tolist()]
    return sorted(seen)


@given(batches(), st.integers(1, 3), layouts, layouts, st.lists(st.integers(1, 10), max_size=4))
def test_the_layout_changes_nothing_of_what_is_learned(
    groups, num_minibatches, one_layout, other_layout, ptx_lengths
):
    config = GRPO(num_minibatches=num_minibatches, aggregation="sequence_mean")
    ptx = [supervised(n) for n in ptx_lengths]
    one, other = (plan(groups, config, ptx=ptx, **layout) for layout in (one_layout, other_layout))
    assert trained_tokens(one) == trained_tokens(other)
    assert one.minibatch_tokens == other.minibatch_tokens
    assert one.samples.rewards.tolist() == other.samples.rewards.tolist()


def heavy_groups():
    """Rollouts of 14 and of 2 tokens with their prompts' 2, groups of one kind each."""
    return [
        RolloutGroup(g, "", tuple(rollout(1.0, n) for _ in range(4)), "")
        for g, n in enumerate([12, 2, 12, 2])
    ]


def test_balanced_ranks_have_even_costs():
    cost = FlopsCost(1.0, 2.0)
    arguments = {"num_ranks": 4, "cost": cost}
    made = plan(heavy_groups(), **arguments)
    assert made.metrics["data/max_over_mean_cost"] == pytest.approx(1.0)
    # Each rank has two long sequences and two short ones.
    for rows in made.rows_of_rank:
        assert int(rows.loss_mask.sum()) == 2 * 12 + 2 * 2
    dealt = plan(heavy_groups(), **arguments, balance=False)
    assert dealt.metrics["data/max_over_mean_cost"] > 1.0
    assert dealt.metrics["data/rows_per_rank"] >= made.metrics["data/rows_per_rank"]


def test_rows_of_a_rank_come_in_multiples_of_the_bucket():
    for balance in (False, True):
        made = plan(heavy_groups(), local_batch_size=2, row_bucket=3, balance=balance)
        assert made.metrics["data/rows_per_rank"] == 12
        made = plan(heavy_groups(), local_batch_size=2, row_bucket=1, balance=balance)
        assert made.metrics["data/rows_per_rank"] == 10


def test_microbatches_of_a_rank_have_even_costs_the_heaviest_first():
    lengths = [14, 12, 7, 7]
    groups = [RolloutGroup(0, "", tuple(rollout(1.0, n) for n in lengths), "")]
    made = plan(groups, cost=FlopsCost(1.0, 2.0), local_batch_size=2)
    tokens = [int(part.loss_mask.sum()) for part in made.rows_of_rank[0].microbatches(2)]
    assert tokens == [14 + 7, 12 + 7]
