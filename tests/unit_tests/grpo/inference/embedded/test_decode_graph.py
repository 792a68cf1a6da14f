# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decoding steps that are captured and replayed sample the same tokens as those that are not."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from engine_harness import (
    TIMEOUT,
    Harness,
    assert_exact,
    harness,
    make_model,
    random_prompt,
    swap_to,
)
from graph_stand_in import TracedGraphs

from torchtitan.grpo.inference.embedded import decode_graph
from torchtitan.grpo.inference.embedded.decode_graph import Capture, Compute
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request

CHUNKED = {"max_slots": 6, "step_tokens": 15}


def graphed(model: Any, capture: Capture, **options: Any) -> Any:
    return harness(model, make_runner=partial(ModelRunner, capture=capture), **options)


def mixed_requests(h: Harness) -> list[Request]:
    """Requests of many lengths that join and leave, each with random numbers of its own."""
    rng, requests = random.Random(1), []
    h.engine.pause().result(TIMEOUT)
    for i in range(24):
        prompt = requests[-1].prompt_ids if i % 4 == 3 else random_prompt(rng)
        sampling = {"temperature": 0.0} if i % 3 == 0 else {"sampling_seed": i, "temperature": 0.7}
        filters = {"top_k": 5, "top_p": 0.9} if i % 5 == 1 else {}
        requests.append(h.submit(prompt, max_new_tokens=rng.randint(1, 30), **sampling, **filters))
    h.engine.resume().result(TIMEOUT)
    h.finish(requests)
    return requests


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_tokens_and_logprobs_equal_those_of_eager_steps(kind: str) -> None:
    model, graphs = make_model(kind), TracedGraphs()
    with harness(model, max_slots=6) as h:
        eager = mixed_requests(h)
    with graphed(model, graphs, max_slots=6) as h:
        replayed = mixed_requests(h)
    # Rows 1, 2, 4 and 6, of which most are padded; all of them read 128 positions.
    assert 3 <= graphs.num_captured <= 4 and graphs.num_replayed > 20
    for one, other in zip(eager, replayed, strict=True):
        assert one.output_ids == other.output_ids
        torch.testing.assert_close(other.logprobs, one.logprobs, atol=1e-4, rtol=0)
    assert_exact(model, replayed)


def test_graphs_are_captured_again_when_the_slots_grow() -> None:
    model, graphs = make_model("qwen3"), TracedGraphs()
    with graphed(model, graphs, max_slots=20) as h:
        long = h.submit([3, 1, 4] * 40, max_new_tokens=16)  # 120 tokens, and 128 positions at first
        h.finish([long])
        assert graphs.num_captured == 2
        short = h.submit([3, 1], max_new_tokens=4)
        h.finish([short])
        assert graphs.num_captured == 3  # the first one wrote to slots of 128 positions
        h.engine.pause().result(TIMEOUT)
        wide = [h.submit([i, 2], max_new_tokens=5) for i in range(20)]  # 16 slots until then
        h.engine.resume().result(TIMEOUT)
        h.finish(wide)
        again = h.submit([3, 1], max_new_tokens=4)
        h.finish([again])
        assert graphs.num_captured == 5
    assert_exact(model, [long, short, *wide, again])


def test_a_group_goes_on_from_the_chunks_of_its_prompt() -> None:
    """Slots are copied between two replays, when a request joins a prompt and when rows move."""
    model, graphs, prompt = make_model("qwen3"), TracedGraphs(), list(range(50)) * 2
    with graphed(model, graphs, **CHUNKED) as h:
        h.engine.pause().result(TIMEOUT)
        watched = h.submit([11, 12], max_new_tokens=60)
        h.resume_until(lambda: len(watched.output_ids) >= 2)
        h.engine.pause().result(TIMEOUT)  # a request that comes after its prompt shares nothing
        group = [h.submit(prompt, max_new_tokens=3 + 3 * i) for i in range(4)]
        h.engine.resume().result(TIMEOUT)
        h.finish([watched, *group])
    assert sum(request.shared_prompt_tokens for request in group) == 3 * len(prompt)
    assert graphs.num_replayed > 20
    assert_exact(model, [watched, *group])


@pytest.mark.parametrize("pause", [False, True])
def test_new_weights_are_used_by_graphs_of_the_old_ones(pause: bool) -> None:
    old, new = make_model("qwen3", seed=1), make_model("qwen3", seed=2)
    graphs = TracedGraphs()
    with graphed(make_model("qwen3", seed=1), graphs) as h:
        h.engine.pause().result(TIMEOUT)
        requests = [h.submit([i, 7, 9], max_new_tokens=60) for i in range(2)]
        watched = h.submit([11, 12], max_new_tokens=60)
        h.resume_until(lambda: len(watched.output_ids) >= 5)
        if pause:
            h.engine.pause().result(TIMEOUT)
        swap_to(h, new, "v2")
        h.engine.resume().result(TIMEOUT)
        h.finish([*requests, watched])
    # For 1, 2 and 4 rows, each of which was captured once, before the swap or after it.
    assert h.engine.num_recomputed == 3 and graphs.num_captured <= 3
    for request in [*requests, watched]:
        assert [version for version, _ in request.segments] == ["default", "v2"]
    assert_exact(old, [*requests, watched], new)


def test_a_failed_capture_is_told_once_and_decoding_goes_on(caplog: Any) -> None:
    model, calls = make_model("qwen3"), []

    def fail(compute: Compute, is_first: bool) -> Compute:
        calls.append(is_first)
        raise RuntimeError("operation not permitted when stream is capturing")

    with graphed(model, fail) as h:
        requests = [h.submit([i, 7], max_new_tokens=20) for i in range(3)]
        h.finish(requests)
    assert calls == [True]
    (line,) = (r.getMessage() for r in caplog.records if "without CUDA graphs" in r.getMessage())
    assert line.endswith("operation not permitted when stream is capturing")
    assert_exact(model, requests)


def test_the_graph_that_was_not_used_for_longest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_graph, "_MAX_GRAPHS", 2)
    model, graphs = make_model("qwen3"), TracedGraphs()
    with graphed(model, graphs, max_slots=4) as h:
        for count, captured in ((1, 1), (2, 2), (1, 2), (4, 3), (1, 3), (2, 4)):
            h.engine.pause().result(TIMEOUT)
            requests = [h.submit([i, 3], max_new_tokens=6) for i in range(count)]
            h.engine.resume().result(TIMEOUT)
            h.finish(requests)
            assert graphs.num_captured == captured, count
            assert_exact(model, requests)
        assert len(h.runner._graphs._graphs) == 2  # pyright: ignore[reportOptionalMemberAccess]


def test_one_long_row_among_short_ones_is_not_read_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, graphs = make_model("qwen3"), TracedGraphs()
    monkeypatch.setattr("torchtitan.grpo.inference.embedded.model._LAYER_CALLS", 0.5)
    with graphed(model, graphs, max_slots=8) as h:  # 512 positions may be read in vain
        h.engine.pause().result(TIMEOUT)
        requests = [h.submit([i] * (2 if i else 250), max_new_tokens=6) for i in range(8)]
        h.engine.resume().result(TIMEOUT)
        h.finish(requests)
        assert (graphs.num_captured, graphs.num_replayed) == (0, 0)
        alone = h.submit([5] * 250, max_new_tokens=6)
        h.finish([alone])
    assert graphs.num_replayed > 0
    assert_exact(model, [*requests, alone])
