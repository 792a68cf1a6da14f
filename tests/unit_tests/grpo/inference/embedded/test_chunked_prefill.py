# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Long prompts beside running requests: nobody stalls, and no number depends on the chunks."""

import random
from typing import Any

import pytest
from engine_harness import (
    TIMEOUT,
    VOCAB,
    Harness,
    assert_exact,
    harness,
    make_model,
    random_prompt,
    swap_to,
)

LONG = [(7 * i + i // 9) % VOCAB for i in range(240)]
CHUNKED = {"max_slots": 4, "step_tokens": 14}


def start(h: Harness, prompt: list[int], **sampling: Any) -> Any:
    """Starts a request, and pauses when it has two tokens."""
    h.engine.pause().result(TIMEOUT)
    request = h.submit(prompt, **sampling)
    h.resume_until(lambda: len(request.output_ids) >= 2)
    h.engine.pause().result(TIMEOUT)
    return request


def start_long(h: Harness) -> tuple[Any, Any]:
    """Starts a request, then one with a long prompt, and stops between two chunks of it."""
    watched = start(h, [11, 12], max_new_tokens=250)
    long = h.submit(LONG, max_new_tokens=3)
    h.resume_until(lambda: len(watched.output_ids) >= 5)
    assert long.prefilled_to is not None and 0 < long.prefilled_to < len(LONG)
    return watched, long


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_samples_and_logprobs_do_not_depend_on_the_chunks(kind: str) -> None:
    model = make_model(kind)
    found = []
    for options in ({"step_tokens": 9}, {"step_tokens": 23}, {"step_tokens": 1000}):
        rng = random.Random(3)
        with harness(model, max_slots=5, max_prefill_tokens=50, **options) as h:
            requests = []
            for i in range(16):
                prompt = requests[-1].prompt_ids if i % 4 == 3 else random_prompt(rng, high=150)
                sampling = {"temperature": 0.0} if i % 3 == 0 else {"sampling_seed": i}
                requests.append(h.submit(prompt, max_new_tokens=rng.randint(1, 30), **sampling))
            h.finish(requests)
        assert_exact(model, requests)
        found.append([request.output_ids for request in requests])
    assert found[0] == found[1] == found[2]


def test_running_requests_sample_while_a_long_prompt_is_computed() -> None:
    model = make_model("qwen3")
    with harness(model, **CHUNKED) as h:
        running = start(h, [11, 12], max_new_tokens=250)
        long, before = h.submit(LONG, max_new_tokens=2), len(running.output_ids)
        h.resume_until(lambda: bool(long.output_ids))
        # 13 tokens of the prompt in each step.
        assert len(running.output_ids) - before >= len(LONG) // 13
        h.engine.abort("request-1").result(TIMEOUT)
        h.finish([long, running])
    assert_exact(model, [running, long])


@pytest.mark.parametrize("pause", [False, True])
def test_new_weights_between_two_chunks_start_the_prompt_anew(pause: bool) -> None:
    old, new = make_model("qwen3", seed=1), make_model("qwen3", seed=2)
    with harness(make_model("qwen3", seed=1), **CHUNKED) as h:
        watched, long = start_long(h)
        if pause:
            h.engine.pause().result(TIMEOUT)
        swap_to(h, new, "v2")
        assert h.engine.num_recomputed == 2
        h.engine.resume().result(TIMEOUT)
        h.finish([watched, long])
    assert long.segments == [("v2", 0)]
    assert_exact(new, [long])
    assert len(watched.segments) == 2
    assert_exact(old, [watched], new)


def test_a_request_aborted_between_two_chunks_frees_its_row() -> None:
    model = make_model("llama")
    with harness(model, **CHUNKED) as h:
        watched, long = start_long(h)
        h.engine.pause().result(TIMEOUT)
        assert h.engine.abort(long.request_id).result(TIMEOUT) == 1
        assert h.engine.num_running == 1
        h.engine.resume().result(TIMEOUT)
        others = [h.submit([i] * 30, max_new_tokens=9) for i in range(5)]
        h.finish([watched, long, *others])
    assert long.output_ids == [] and long.finish_reason is not None
    assert_exact(model, [watched, *others])


def test_rows_move_while_a_prompt_is_computed() -> None:
    """Short requests end and leave holes, into which the row of the long prompt moves."""
    model = make_model("qwen3")
    with harness(model, **CHUNKED) as h:
        h.engine.pause().result(TIMEOUT)
        short = [h.submit([i, 5], max_new_tokens=4 + i) for i in range(3)]
        long = h.submit(LONG, max_new_tokens=5)
        h.engine.resume().result(TIMEOUT)
        h.finish([*short, long])
    assert_exact(model, [*short, long])
