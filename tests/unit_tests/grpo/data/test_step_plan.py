from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group, rollout

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import FlopsCost, token_cost
from torchtitan.grpo.data.planner import batch_metrics
from torchtitan.grpo.data.rows import NO_SAMPLE, Sample
from torchtitan.grpo.data.step_plan import epoch_order, plan_step
from torchtitan.grpo.losses.advantages import compute_advantages

ROW_LEN = 16


def written(reward, length=3, version=7, first=0, **more):
    """A rollout whose tokens count up, with ratings that tell them apart."""
    ids = np.arange(first, first + length, dtype=np.int32)
    ratings = {
        "teacher_top_ids": ids[:, None] * np.array([5, 7], np.int32),
        "teacher_top_logprobs": -ids[:, None] / np.array([2, 3], np.float32),
    }
    return rollout(ids, reward, -ids, version, **ratings | more)


def supervised(length):
    return Sample(np.array([1], np.int32), np.arange(length, dtype=np.int32), None)


def plan(groups, config=None, **arguments):
    defaults = {"num_ranks": 1, "row_len": ROW_LEN, "local_batch_size": 1}
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
    masked = written(2.0, 7, sampled=np.array([1, 0, 0, 1, 1, 1, 1], np.bool_))
    groups = [
        group(4, written(1.0, version=6), written(0.0), written(None)),
        group(9, masked, written(2.0)),
    ]
    made = plan(groups, num_ranks=2, row_len=10)
    assert made.num_trained_tokens == sum(made.minibatch_tokens) == 3 + 3 + 5 + 3
    assert made.num_tokens == 3 + 3 + 7 + 3 + 4 * 2
    metrics = batch_metrics([(groups, made)], version=7)
    assert metrics["staleness/max_steps"] == 1
    assert metrics["staleness/mean_steps"] == 0.25
    assert metrics["data/filtered_groups_fraction"] == 0
    assert 0 < metrics["data/padding_fraction"] < 1
    assert made.samples.rewards.tolist() == [1, 0, 2, 2]
    assert made.samples.group_ids.tolist() == [4, 4, 9, 9]
    assert made.samples.completion_lengths.tolist() == [3, 3, 5, 3]
    assert total(made.rows_of_rank, "loss_mask") == 14
    assert total(made.rows_of_rank, "loss_weights") == pytest.approx(1)
    # Of what an environment wrote there is no logprob.
    assert total(made.rows_of_rank, "generator_logprobs") == -3 * (0 + 1 + 2) - (0 + 3 + 4 + 5 + 6)


def advantages_of(made):
    table = made.samples
    return compute_advantages(table.rewards, table.group_ids, kind="group_mean")


def test_minibatches_take_whole_groups_and_even_out_tokens():
    groups = [
        group(g, written(1.0, n), written(0.0, n)) for g, n in {0: 8, 1: 7, 2: 2, 3: 1}.items()
    ]
    first, second = minibatches_of(plan(groups, GRPO(num_minibatches=2)))
    assert total(first, "loss_mask") == total(second, "loss_mask") == 18
    assert {i for rows in first for i in rows.sample_ids.unique().tolist()} == {-1, 0, 1, 6, 7}
    assert first[0].loss_weights.max() == pytest.approx(1 / 18)
    assert [epoch_order(3, epoch) for epoch in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_uninformative_groups_are_filtered_by_their_shaped_rewards():
    groups = [
        group(0, written(1.0), written(0.0)),
        group(1, written(1.0), written(1.0)),
        group(2, written(1.0, 3), written(1.0, 8)),  # told apart by the overlong penalty alone
        group(3, written(0.0), written(0.0)),
    ]
    config = GRPO(filter_zero_advantage=True, overlong_buffer=4, overlong_penalty=0.5)
    made = plan(groups, config)
    assert made.metrics["data/filtered_groups_fraction"] == 0.5
    assert made.samples.group_ids.tolist() == [0, 0, 2, 2]
    assert made.samples.rewards.tolist() == [1, 0, 1, 0.5]
    assert made.num_trained_tokens == 3 + 3 + 3 + 8
    assert total(made.rows_of_rank, "loss_weights") == pytest.approx(1)
    # A minibatch, or a batch, of which nothing is left still has rows.
    assert sorted(plan(groups[:2], replace(config, num_minibatches=2)).minibatch_tokens) == [0, 6]
    nothing = plan(groups[1:2], replace(config, num_minibatches=2), num_ranks=2, local_batch_size=2)
    assert [rows.num_rows for rows in nothing.rows_of_rank] == [4, 4]
    assert (nothing.num_trained_tokens, nothing.num_tokens, len(nothing.samples)) == (0, 0, 0)
    assert nothing.metrics["data/filtered_groups_fraction"] == 1
    for rows in nothing.rows_of_rank:
        assert not rows.loss_mask.any()
        assert not rows.with_advantages(advantages_of(nothing)).advantages.any()


def test_supervised_rows_are_spread_and_weigh_their_coefficient_in_each_minibatch():
    groups = [group(g, written(1.0), written(0.0)) for g in range(2)]
    ptx = [supervised(n) for n in (5, 4, 3, 2)]
    made = plan(groups, GRPO(num_minibatches=2, ptx_coef=0.5), ptx=ptx, num_ranks=2)
    for rows_of_rank in minibatches_of(made):
        assert total(rows_of_rank, "ptx_weights") == pytest.approx(0.5)
        assert total(rows_of_rank, "loss_weights") == pytest.approx(1)
        assert sum(int((rows.ptx_weights > 0).sum()) for rows in rows_of_rank) == 7
    assert made.minibatch_tokens == [2 * 3 + 7] * 2
    assert (made.num_trained_tokens, made.num_tokens) == (4 * 3, 4 * 5 + 14 + 4)
    assert plan(groups, GRPO(ptx_coef=0.0), ptx=ptx).minibatch_tokens == [4 * 3]


def test_constant_length_weights_use_the_longest_completion():
    made = plan([group(0, written(1.0), written(0.0))], GRPO(aggregation="constant_length"))
    assert made.rows_of_rank[0].loss_weights.max() == pytest.approx(1 / (2 * 8))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_a_rollout_weighs_as_much_in_several_rows_as_in_one(aggregation):
    sampled = np.array([True] * 3 + [False] * 4 + [True] * 3)

    def of(reward, new_rows=()):
        logprobs = np.where(sampled, -np.arange(10) / 10, 0)
        return rollout(range(10, 20), reward, logprobs, 7, sampled=sampled, new_rows=new_rows)

    whole, split = (
        plan(
            [group(i, of(0.0, rows), of(1.0), of(2.0, rows)) for i in range(2)],
            GRPO(aggregation=aggregation), num_ranks=2,
        )
        for rows in ((), ((3, 4),))
    )  # fmt: skip
    assert (len(whole.sequences), len(split.sequences)) == (6, 10)
    assert len(whole.samples) == len(split.samples) == 6
    assert split.minibatch_tokens == whole.minibatch_tokens
    assert (split.mass, split.num_trained_tokens) == (whole.mass, whole.num_trained_tokens)
    for field in ("loss_weights", "generator_logprobs"):
        sums = [torch.zeros(6), torch.zeros(6)]
        for made, of_sample in zip((whole, split), sums, strict=True):
            for rows in made.rows_of_rank:
                trained = rows.loss_mask
                of_sample.scatter_add_(0, rows.sample_ids[trained], getattr(rows, field)[trained])
        torch.testing.assert_close(*sums)


def test_balanced_ranks_have_even_costs_and_rows_in_buckets():
    groups = [group(g, *(written(1.0, n) for _ in range(4))) for g, n in enumerate([12, 2, 12, 2])]
    arguments = {"num_ranks": 4, "cost": FlopsCost(1.0, 2.0)}
    made = plan(groups, **arguments)
    assert made.metrics["data/max_over_mean_cost"] == pytest.approx(1.0)
    for rows in made.rows_of_rank:  # two long sequences and two short ones
        assert int(rows.loss_mask.sum()) == 2 * 12 + 2 * 2
    dealt = plan(groups, **arguments, balance=False)
    assert dealt.metrics["data/max_over_mean_cost"] > 1.0
    assert dealt.metrics["data/rows_per_rank"] >= made.metrics["data/rows_per_rank"]
    for balance, bucket, expected in ((0, 3, 12), (1, 3, 12), (0, 1, 10), (1, 1, 10)):
        made = plan(groups, local_batch_size=2, row_bucket=bucket, balance=bool(balance))
        assert made.metrics["data/rows_per_rank"] == expected
    # Without buckets, the last microbatch has only the rows that are needed, the lightest ones.
    made = plan(groups, local_batch_size=4, row_bucket=0, cost=FlopsCost(1.0, 2.0))
    assert made.metrics["data/rows_per_rank"] == 10
    num_trained = [int(row.loss_mask.sum()) for row in made.rows_of_rank[0].microbatches(1)]
    assert num_trained == sorted(num_trained, reverse=True)
    # The heaviest microbatch comes first.
    made = plan(
        [group(0, *(written(1.0, n) for n in (14, 12, 7, 7)))],
        cost=FlopsCost(1.0, 2.0), local_batch_size=2,
    )  # fmt: skip
    tokens = [int(part.loss_mask.sum()) for part in made.rows_of_rank[0].microbatches(2)]
    assert tokens == [14 + 7, 12 + 7]


@st.composite
def batches(draw):
    num_groups = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=num_groups, max_size=num_groups))
    scored = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 1.0]))
    made = st.builds(written, scored, st.integers(1, 14))
    return [group(10 * g, *(draw(made) for _ in range(n))) for g, n in enumerate(sizes)]


layouts = st.fixed_dictionaries({
    "shares_contexts": st.booleans(),
    "num_ranks": st.integers(1, 3), "local_batch_size": st.integers(1, 2),
    "row_bucket": st.integers(0, 3), "balance": st.booleans(),
    "cost": st.sampled_from([token_cost, FlopsCost(1.0, 5.0)]),
})  # fmt: skip


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
    multiple = layout["local_batch_size"] * layout["row_bucket"] or 1
    assert sizes.pop() % (num_minibatches * multiple) == 0
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
        np.add.at(counts, rows.sample_ids[rows.loss_mask].numpy(), 1)
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
