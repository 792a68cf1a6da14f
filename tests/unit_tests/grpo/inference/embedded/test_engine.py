# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares the embedded engine with plain forwards of transformers, in one process."""

from typing import Any

import pytest
import torch
from engine_harness import (
    TIMEOUT,
    Harness,
    assert_exact,
    harness,
    make_model,
    swap_to,
)

from torchtitan.grpo.inference.embedded.engine import EngineError
from torchtitan.grpo.inference.embedded.model import ModelRunner


def test_greedy_takes_the_likeliest_token_and_stops_at_a_stop_token() -> None:
    model = make_model("llama")
    with harness(model) as h:
        free = h.submit([1, 2, 3], max_new_tokens=12, temperature=0.0)
        h.finish([free])
        stop = free.output_ids[5]
        first = free.output_ids.index(stop)
        stopped = h.submit(
            [1, 2, 3], max_new_tokens=12, temperature=0.0, stop_token_ids=frozenset({stop})
        )
        h.finish([stopped])
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish_reason == {"type": "stop", "matched": stop}
    assert free.finish_reason == {"type": "length", "length": 12}


def test_a_seeded_request_repeats_whatever_runs_beside_it() -> None:
    with harness(make_model("qwen3"), max_slots=8) as h:
        alone = h.submit([9, 8], max_new_tokens=20, sampling_seed=7)
        h.finish([alone])
        others = [h.submit([i, 2], max_new_tokens=15) for i in range(6)]
        again = h.submit([9, 8], max_new_tokens=20, sampling_seed=7)
        other_seed = h.submit([9, 8], max_new_tokens=20, sampling_seed=8)
        h.finish([*others, again, other_seed])
    assert again.output_ids == alone.output_ids != other_seed.output_ids


def test_new_weights_start_a_segment_of_waiting_requests_too() -> None:
    """With one slot, one request waits for its first token, and a swap sends the other one back."""
    with harness(make_model("qwen3", seed=1), max_slots=1) as h:
        h.engine.pause().result(TIMEOUT)
        running = h.submit([11, 12], max_new_tokens=250)
        h.resume_until(lambda: len(running.output_ids) >= 3)
        h.engine.pause().result(TIMEOUT)
        waiting = h.submit([5], max_new_tokens=2)
        swap_to(h, make_model("qwen3", seed=2), "v2")
        swap_to(h, make_model("qwen3", seed=3), "v3")  # the running request waits by now
        assert h.engine.num_waiting == 2
        h.engine.resume().result(TIMEOUT)
        h.engine.abort("request-1").result(TIMEOUT)
        h.finish([running, waiting])
    assert waiting.segments == [("v3", 0)]
    assert [version for version, _ in running.segments] == ["default", "v3"]


def test_a_paused_engine_keeps_requests_and_samples_nothing() -> None:
    with harness(make_model("qwen3")) as h:
        h.engine.pause().result(TIMEOUT)
        request = h.submit([1], max_new_tokens=250)
        h.resume_until(lambda: len(request.output_ids) >= 3)
        h.engine.pause().result(TIMEOUT)
        tokens, steps = len(request.output_ids), h.engine.num_steps
        late = h.submit([2], max_new_tokens=2)
        h.engine.run(lambda: None).result(TIMEOUT)
        assert (len(request.output_ids), h.engine.num_steps) == (tokens, steps)
        assert h.engine.num_waiting == 1
        h.engine.resume().result(TIMEOUT)
        h.finish([request, late])
    assert request.finish_reason == {"type": "length", "length": 250}


def test_abort_ends_by_prefix_and_the_rest_stays_exact() -> None:
    model = make_model("llama")
    with harness(model, max_slots=16) as h:
        h.engine.pause().result(TIMEOUT)
        requests = [h.submit([i, i + 1], max_new_tokens=280) for i in range(12)]
        h.resume_until(lambda: len(requests[0].output_ids) >= 4)
        # request-1, request-10, request-11 and request-12
        assert h.engine.abort("request-1").result(TIMEOUT) == 4
        h.finish(requests)
    ended = [r for r in requests if r.finish_reason and r.finish_reason["type"] == "abort"]
    assert [r.request_id for r in ended] == ["request-1"] + [f"request-{i}" for i in (10, 11, 12)]
    assert all(request.output_ids for request in requests)
    assert_exact(model, requests)


def test_logits_that_are_not_finite_abort_the_request() -> None:
    model = make_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with harness(model) as h:
        request = h.submit([1, 2], max_new_tokens=5)
        h.finish([request])
    assert request.finish_reason is not None
    assert "not finite" in request.finish_reason["message"]


def test_a_failed_engine_tells_the_cause_to_all_who_wait(caplog: Any) -> None:
    h = Harness(make_model("qwen3"))
    h.engine.pause().result(TIMEOUT)
    request = h.submit([1], max_new_tokens=5)

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        h.engine.run(fail).result(TIMEOUT)
    h.finish([request])
    assert request.finish_reason is not None and "out of memory" in request.finish_reason["message"]
    with pytest.raises(EngineError, match="out of memory"):
        h.engine.resume().result(TIMEOUT)
    assert h.engine.close(TIMEOUT) and not h.engine.is_alive
    assert "engine's thread has failed" in caplog.text


def test_sliding_window_models_are_refused_by_name() -> None:
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"qwen3 has .*sliding_attention"):
        ModelRunner(model, 2, 16)
