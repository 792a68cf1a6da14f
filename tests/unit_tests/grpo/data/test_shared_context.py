# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sequences of a group share the contexts with which they begin, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group, rollout

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import FlopsCost, token_cost
from torchtitan.grpo.data.layout import Layout
from torchtitan.grpo.data.planner import token_metrics
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.data.shared_context import (
    NO_GROUP,
    Span,
    cost_of,
    num_computed,
    spans_of,
)
from torchtitan.grpo.data.step_plan import plan_step
from torchtitan.grpo.rollout.codec import pack_without_arrays, unpack
from torchtitan.grpo.types import RolloutGroup


def sample(prompt, completion=(1,), group=0) -> Sample:
    ids = np.array(completion, np.int32)
    return Sample(np.array(prompt, np.int32), ids, -ids.astype(np.float32), group=group)


def tokens_of(one: Sample) -> list[int]:
    return [*one.prompt_ids.tolist(), *one.completion_ids.tolist()]


def test_a_tree_has_a_span_for_each_context_and_each_rest():
    sequences = [
        sample([5, 6, 9], [7, 8]), sample([5, 6, 9], [1]), sample([5, 4], [2]), sample([3], [2, 2]),
    ]  # fmt: skip
    spans = spans_of(sequences)
    assert spans == [
        Span(0, 0, 1, 9, is_context=True),
        Span(0, 1, 2, 6, is_context=True),
        Span(0, 2, 5, 3, is_context=False),
        Span(1, 2, 4, 2, is_context=False),
        Span(2, 1, 3, 2, is_context=False),
        Span(3, 0, 3, 3, is_context=False),
    ]
    assert num_computed(spans) == 12
    # Each token sees those before it in its sequence, shared or not.
    assert cost_of(spans, FlopsCost(0, 1)) == 1 + 2 + (3 + 4 + 5) + (3 + 4) + (2 + 3) + (1 + 2 + 3)


def test_a_chain_of_contexts_is_shared_down_to_the_largest_depth():
    """Each row of an episode goes on where the one before it ends; there is no end to it."""
    chain = [sample(range(2 + 3 * n), (99,)) for n in range(1000)]
    spans = spans_of(chain)
    contexts = [span for span in spans if span.is_context]
    assert [(span.begin, span.end) for span in contexts] == [(0, 1), (1, 4), (4, 7), (7, 10)]
    assert len(spans) == 4 + len(chain)
    assert {span.begin for span in spans if not span.is_context} == {1, 4, 7, 10}


contexts = st.lists(st.integers(0, 1), min_size=1, max_size=5)
sequences = st.lists(
    st.builds(
        sample, contexts, st.lists(st.integers(2, 9), min_size=1, max_size=4),
        st.sampled_from([NO_GROUP, 0, 1]),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@given(sequences)
def test_each_token_sees_exactly_its_sequence_and_equal_contexts_are_computed_once(members):
    spans = spans_of(members)
    row_len = num_computed(spans) + 1
    rows = build_rows(members, [list(range(len(members)))], row_len)
    tokens, positions, reach = (t[0].tolist() for t in (rows.tokens, rows.positions, rows.reach))
    seen = []
    start = 0
    for span in spans:
        last = start + span.num_tokens - 1
        start += span.num_tokens
        if not span.is_context:
            sees = [k for k in range(last + 1) if last < reach[k]]
            assert [positions[k] for k in sees] == list(range(len(sees)))
            seen.append((span.sequence, [tokens[k] for k in sees]))
    assert sorted(seen) == [(i, tokens_of(one)) for i, one in enumerate(members)]
    nodes = {
        (one.group, *one.prompt_ids[:n].tolist())
        for one in members if one.group != NO_GROUP
        for n in range(1, len(one.prompt_ids))
    }  # fmt: skip
    rests = sum(
        one.num_tokens if one.group == NO_GROUP else 1 + len(one.completion_ids) for one in members
    )
    assert num_computed(spans) == len(nodes) + rests


def groups_of(num_groups: int, group_size: int, prompt: int, completion: int) -> list[RolloutGroup]:
    made = []
    for number in range(num_groups):
        ids = np.arange(prompt, dtype=np.int32) + number
        one = (rollout(completion, float(i % 2), prompt_ids=ids) for i in range(group_size))
        made.append(group(number, *one))
    return made


def plan(groups, **arguments):
    defaults = {"num_ranks": 1, "row_len": 600, "local_batch_size": 1}
    defaults |= {
        "max_new_tokens": 64,
        "balance": True,
        "cost": FlopsCost(100.0, 1.0),
        "row_bucket": 1,
    }
    return plan_step(groups, GRPO(), **({"shares_contexts": True} | defaults | arguments))


@pytest.mark.parametrize("balance", [True, False])
def test_eight_completions_as_long_as_their_prompt_need_few_more_than_half_of_the_tokens(balance):
    groups = groups_of(4, 8, 64, 64)
    made, before = (plan(groups, balance=balance, shares_contexts=on) for on in (True, False))
    assert before.num_computed == before.num_tokens == made.num_tokens == 4 * 8 * 128
    assert made.num_computed / made.num_tokens <= 0.57
    shared = [token_metrics([p])["time/shared_tokens_fraction"] for p in (made, before)]
    assert shared == [1 - made.num_computed / made.num_tokens, 0]
    assert made.metrics["data/rows_per_rank"] < before.metrics["data/rows_per_rank"]


def test_a_group_is_divided_where_balance_or_the_length_of_rows_asks_for_it():
    (one,) = groups_of(1, 8, 32, 32)
    # One group for two ranks: half of it for each.
    made = plan([one], num_ranks=2)
    assert made.metrics["data/max_over_mean_cost"] == 1
    assert [len(row) for rows in made.layout for row in rows] == [4, 4]
    assert made.num_computed == 2 * (31 + 4 * 33)
    # A row has room for the prompt and three completions.
    made = plan([one], row_len=31 + 3 * 33)
    assert sorted(len(row) for row in made.layout[0]) == [2, 3, 3]
    made = plan([one], row_len=64)
    assert made.num_computed == made.num_tokens


def test_other_groups_and_supervised_sequences_share_nothing():
    groups = groups_of(2, 2, 8, 4)
    same = [replace(r, prompt_ids=groups[0].rollouts[0].prompt_ids) for r in groups[1].rollouts]
    ids = groups[0].rollouts[0].prompt_ids
    supervised = [Sample(ids, np.arange(4, dtype=np.int32), None) for _ in range(2)]
    made = plan([groups[0], group(1, *same)], ptx=supervised)
    assert made.num_computed == 2 * (7 + 2 * 5) + 2 * 12


def test_rows_of_an_episode_share_the_context_with_which_they_begin():
    """The second row of each rollout begins with the prompt and goes on otherwise than the first."""
    prompt = np.arange(5, dtype=np.int32)
    ids = np.array([9, 9, *prompt, 20, 21, 30, 31], np.int32)
    one, other = (
        rollout(ids, float(i), np.zeros(11), prompt_ids=prompt, new_rows=((2, 7),)) for i in (0, 1)
    )
    made = plan([group(0, one, other)])
    # The prompt but for its last token; this token and the contexts' next one; and the rests.
    assert made.num_computed == 4 + 2 * (1 + 2) + (1 + 1) + 2 * (1 + 2)


def test_without_tokens_prompts_that_are_one_array_are_shared_and_rows_fit():
    groups = groups_of(2, 4, 9, 5)
    # One rollout of the first group has a prompt of its own, one of the second goes on in a new row.
    one = replace(groups[0].rollouts[3], prompt_ids=np.full(9, 7, np.int32))
    groups[0] = group(0, *groups[0].rollouts[:3], one)
    long = rollout(
        6, 1.0, np.zeros(6), prompt_ids=groups[1].rollouts[0].prompt_ids, new_rows=((2, 2),),
        sampled=np.array([1, 1, 0, 0, 1, 1], np.bool_),
    )  # fmt: skip
    groups[1] = group(1, *groups[1].rollouts[:3], long)
    packed = unpack(pack_without_arrays(groups, 0), list[RolloutGroup])
    assert not any(r.token_ids.any() for g in packed for r in g.rollouts)
    blind = plan(packed, knows_tokens=False, row_len=64)
    assert blind.num_computed == (8 + 3 * 6) + 14 + (8 + 3 * 6 + 3) + (2 + 2)
    # What ranks make of it with the tokens that they fetch: all sequences, in rows that have room.
    known = plan(groups, row_len=64)
    fetched = []
    for one in blind.sequences:
        (same,) = [s for s in known.sequences if (s.source, s.part) == (one.source, one.part)]
        fetched.append(replace(same, group=one.group))
    for rows in blind.layout:
        built = build_rows(fetched, rows, 64)
        assert int(built.loss_mask.sum()) == known.num_trained_tokens
        assert torch.equal(built.reach, build_rows(blind.sequences, rows, 64).reach)


def test_costs_of_ranks_are_those_of_what_is_computed():
    samples = [sample(range(9), [1, 2], group=i // 4) for i in range(8)]
    layout = Layout(2, 64, 1, 1, balance=True, cost=token_cost)
    spread = layout.spread(samples)
    assert layout.rank_costs(spread, samples) == [8 + 4 * 3] * 2
    assert sorted(map(sorted, (row for rows in spread for row in rows))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
