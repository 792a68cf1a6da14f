# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prompts are rated side by side, exactly as each of them alone."""

import random
import threading

import numpy as np
import pytest
import torch
from engine_harness import TIMEOUT, Harness, harness, make_model, random_prompt

from torchtitan.grpo.inference.client import PromptRating
from torchtitan.grpo.inference.embedded.prefill import padded_batches
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams
from torchtitan.grpo.inference.embedded.weights import WeightTable


def rating_request(prompt: list[int], max_new_tokens: int = 0, num_top: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    request = Request("r", prompt, params, frozenset(), logprob_start=0)
    request.num_top = num_top
    return request


def count_passes(h: Harness) -> list[int]:
    """Returns a list to which each pass over prompts adds its number of sequences."""
    sizes, compute = [], h.runner.rate

    def counted(sequences: list[list[int]], num_top: int) -> list[PromptRating]:
        sizes.append(len(sequences))
        return compute(sequences, num_top)

    h.runner.rate = counted
    return sizes


def hold(h: Harness) -> threading.Event:
    """Makes the engine carry out a call until the event is set: further calls wait together."""
    begun, release = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        release.wait(TIMEOUT)

    h.engine.run(wait)
    assert begun.wait(TIMEOUT)
    return release


def rate_together(h: Harness, requests: list[Request]) -> None:
    sizes, release = count_passes(h), hold(h)
    queued = [h.engine.submit([request]) for request in requests]
    release.set()
    for future in queued:
        future.result(TIMEOUT)
    h.finish(requests)
    assert sizes == [len(requests)]


def alone(h: Harness, prompt: list[int], num_top: int = 0) -> PromptRating:
    (found,) = h.engine.run(lambda: h.runner.rate([prompt], num_top)).result(TIMEOUT)
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_ratings_that_wait_are_computed_together_and_are_those_of_each_alone(kind: str) -> None:
    rng = random.Random(3)
    prompts = [[7], *(random_prompt(rng, 2, 60) for _ in range(19))]
    with harness(make_model(kind), max_prefill_tokens=2000) as h:
        expected = [alone(h, prompt) for prompt in prompts]
        requests = [rating_request(prompt, i % 2) for i, prompt in enumerate(prompts)]
        rate_together(h, requests)
    for request, rating in zip(requests, expected, strict=True):
        assert len(request.rating.logprobs) == len(request.prompt_ids) - 1
        torch.testing.assert_close(request.rating.logprobs, rating.logprobs, atol=1e-5, rtol=0)


def test_requests_that_share_a_pass_may_ask_for_different_numbers_of_tokens() -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, 2, 30) for _ in range(4)]
    with harness(make_model("qwen3")) as h:
        expected = [alone(h, prompt, 5) for prompt in prompts]
        numbers = zip((0, 5, 3, 1), prompts, strict=True)
        requests = [rating_request(prompt, num_top=n) for n, prompt in numbers]
        rate_together(h, requests)
    for request, rating in zip(requests, expected, strict=True):
        found, wanted = request.rating.top, rating.top
        assert found.ids.shape == (len(request.prompt_ids) - 1, 5)
        np.testing.assert_array_equal(found.ids, wanted.ids)
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


def test_a_rating_is_of_the_weights_that_were_there_when_it_was_asked_for() -> None:
    prompt = [5, 6, 7, 8]
    with harness(make_model("qwen3", seed=1)) as h:
        before = alone(h, prompt)
        table = WeightTable(h.model)
        other = make_model("qwen3", seed=2).state_dict()
        prepared = {name: table.prepared(name, tensor) for name, tensor in other.items()}
        first, second = rating_request(prompt), rating_request(prompt)
        release = hold(h)
        h.engine.submit([first])
        swapped = h.engine.swap_weights(lambda: table.adopt(prepared), "v2")
        h.engine.submit([second])
        release.set()
        swapped.result(TIMEOUT)
        h.finish([first, second])
        after = alone(h, prompt)
    assert [first.segments, second.segments] == [[("default", 0)], [("v2", 0)]]
    torch.testing.assert_close(first.rating.logprobs, before.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(second.rating.logprobs, after.logprobs, atol=1e-5, rtol=0)
    pairs = zip(before.logprobs, after.logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) > 0.1


@pytest.mark.parametrize(
    ("lengths", "most", "batches"),
    [
        ([2, 6, 3], 8, [[0, 2], [1]]),
        ([4, 4, 4], 8, [[0, 1], [2]]),
        ([9, 1], 8, [[1], [0]]),
        ([], 8, []),
    ],
)
def test_a_pass_has_a_bounded_number_of_tokens_with_its_padding(lengths, most, batches) -> None:
    assert padded_batches(lengths, most) == batches
