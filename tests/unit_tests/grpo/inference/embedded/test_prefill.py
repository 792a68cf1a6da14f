# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests which tokens of prompts a step computes, and how rows are cut into ranges."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.inference.embedded.prefill import PrefillQueue
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams
from torchtitan.grpo.inference.embedded.step_layout import split_rows


def request_of(tokens: list[int], sampled: int = 0) -> Request:
    request = Request("r", tokens, SamplingParams(), frozenset())
    request.output_ids = [0] * sampled
    return request


def queue_of(*requests: Request, step_tokens: int = 20) -> PrefillQueue:
    queue = PrefillQueue(step_tokens, max_prefill_tokens=100)
    queue.waiting.extend(requests)
    return queue


def test_prompts_get_what_running_requests_leave_of_the_budget() -> None:
    long = request_of(list(range(30)))
    queue = queue_of(long, request_of([1, 2]))
    chunks = []
    for _ in range(3):
        plan = queue.plan(num_running=8, num_free=4)
        assert plan.chunk is not None
        chunks.append((plan.chunk.start, plan.chunk.stop, long.prefilled_to, len(plan.whole)))
    # 12 of 20 tokens a step. The short prompt keeps its place behind the long one.
    assert chunks == [(0, 12, 12, 0), (12, 24, 24, 0), (24, 30, None, 1)]
    assert not queue.waiting and queue.num_cut == 0


def test_where_nobody_would_stall_prompts_are_computed_at_once() -> None:
    queue = queue_of(request_of(list(range(30))), request_of([1, 2]))
    plan = queue.plan(num_running=0, num_free=4)
    assert plan.chunk is None and [p.stop for p in plan.whole] == [30, 2]
    queue = queue_of(request_of(list(range(30)), sampled=5))  # sent back by new weights
    plan = queue.plan(num_running=8, num_free=4)
    assert plan.chunk is None and [p.stop for p in plan.whole] == [35]


def test_padding_counts_as_tokens() -> None:
    queue = queue_of(request_of([1]), request_of([1, 2, 3, 4, 5]), request_of([2] * 5))
    plan = queue.plan(num_running=8, num_free=4)  # 12 tokens: two rows of 5 fit, three do not
    assert [p.tokens for p in plan.whole] == [[1], [1, 2, 3, 4, 5]]
    assert plan.chunk is not None and (plan.chunk.start, plan.chunk.stop) == (0, 2)


def test_equal_prompts_are_computed_once_and_may_join_later() -> None:
    prompt = list(range(30))
    first, second, third = (request_of(prompt) for _ in range(3))
    queue = queue_of(first, second)
    plan = queue.plan(num_running=8, num_free=3)
    queue.waiting.append(third)
    plan = queue.plan(num_running=8, num_free=1)
    assert plan.chunk is not None and plan.chunk.requests == [first, second, third]
    assert [r.shared_prompt_tokens for r in plan.chunk.requests] == [0, 30, 30]
    assert plan.chunk.start == 12 and third.prefilled_to == 24
    queue = queue_of(request_of(prompt), request_of(prompt))
    queue.plan(num_running=8, num_free=1)
    assert len(queue.waiting) == 1 and queue.num_cut == 1, "one has no free row"


def test_put_back_forgets_chunks_and_keeps_the_order() -> None:
    running, long, waiting = request_of([1], 2), request_of([2] * 30), request_of([3])
    queue = queue_of(long, waiting)
    queue.plan(num_running=8, num_free=4)
    running.row, long.row = 0, 1
    assert queue.put_back([running]) == 2
    assert list(queue.waiting) == [running, long, waiting]
    assert queue.cut is None and long.row is None and long.prefilled_to is None


def test_the_rest_of_a_group_goes_on_if_one_of_it_ends() -> None:
    first, second = request_of([1] * 30), request_of([1] * 30)
    queue = queue_of(first, second)
    queue.plan(num_running=8, num_free=4)
    queue.drop(first)
    assert queue.num_cut == 1
    queue.drop(second)
    assert queue.cut is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    running=st.integers(1, 8),
    step_tokens=st.integers(10, 40),
)
def test_every_step_keeps_to_the_budget_and_every_prompt_is_computed(
    lengths, running, step_tokens
) -> None:
    requests = [request_of([i] * n) for i, n in enumerate(lengths)]
    queue = queue_of(*requests, step_tokens=step_tokens)
    computed = dict.fromkeys(range(len(lengths)), 0)
    order = []
    while queue.waiting or queue.cut:
        plan = queue.plan(running, num_free=3)
        padded = len(plan.whole) * max((len(p.tokens) for p in plan.whole), default=0)
        chunk = plan.chunk.stop - plan.chunk.start if plan.chunk else 0
        assert 0 < padded + chunk <= step_tokens - running
        for prefill in plan.prefills:
            name = prefill.tokens[0]
            assert prefill.start == computed[name]
            computed[name] = prefill.stop
            if prefill.stop == len(prefill.tokens):
                order.append(name)
    assert computed == dict(enumerate(lengths))
    assert sorted(order) == list(range(len(lengths)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 3000), max_size=40), cost=st.integers(0, 2000))
def test_ranges_are_all_rows_and_waste_no_more_than_a_call(lengths, cost) -> None:
    ranges = split_rows(lengths, cost)
    assert [r for a in ranges for r in range(a.start, a.stop)] == list(range(len(lengths)))
    for rows in ranges:
        own = lengths[rows.start : rows.stop]
        assert rows.length == max(own)
        assert rows.length * len(own) - sum(own) <= cost
