# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests and their seeds; answers that are refused, or wait for the attestation of weights."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, generation, make, submit

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.sglang import answers as sglang
from torchtitan.grpo.inference.vllm import answers as vllm
from torchtitan.grpo.rollout.serving.requests import Sampling, check_generation
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt


async def written_ahead(seconds: float = 20.0):
    """A completion that was written under version 4 of a server that is attested with 3."""

    async def answer(request: GenerateRequest) -> Generation:
        return generation(4 if len(server.requests) == 1 else 5)

    server = LocalServer("http://a", answer)
    dispatcher = make(server, request_timeout_seconds=seconds)
    dispatcher.set_version(server.url, 3)
    task = submit(dispatcher, server.url)
    await asyncio.sleep(0.05)
    assert server.requests
    assert not task.done()
    return server, dispatcher, task


async def test_completion_under_weights_not_yet_attested_waits_for_that():
    server, dispatcher, task = await written_ahead()
    dispatcher.set_version("http://a", 4)
    assert (await task).segments[0].version == 4
    assert len(server.requests) == 1


async def test_completion_under_weights_that_turn_out_wrong_is_generated_again():
    server, dispatcher, task = await written_ahead()
    dispatcher.set_lost("http://a", "its logprobs are not the trainer's")
    dispatcher.set_version("http://a", 5)
    assert (await task).segments[0].version == 5
    assert len(server.requests) == 2


async def test_completion_under_weights_that_nobody_attests_fails_at_its_timeout():
    server, dispatcher, task = await written_ahead(0.5)
    with pytest.raises(ServerError, match="version 5, which was not attested"):
        await task
    assert dispatcher.attempts.num_failed == len(server.requests) == 2
    assert "version 5, which was not attested" in dispatcher.attempts.last_error


async def test_server_that_answers_with_older_weights_than_attested_gets_no_more_work():
    dispatcher = make(LocalServer("http://a"))
    dispatcher.set_version("http://a", 4)
    await submit(dispatcher, "http://a")
    assert dispatcher.choose(lambda version: True) is None


@pytest.mark.parametrize(
    ("seed", "samples_unknown", "sent"),
    [
        (None, False, [(), (), ()]),  # a trained model pays nothing
        (None, True, [(), (99,), (99,), (99,)]),
        (7, True, [(99,), (99,), (99,)]),
    ],
)
async def test_ids_that_are_no_token_are_excluded_once_one_was_sampled(seed, samples_unknown, sent):
    async def answer(request: GenerateRequest) -> Generation:
        found = generation()
        if samples_unknown and not request.unknown_ids:
            found.token_ids[-1] = 99
        return found

    server = LocalServer("http://a", answer)
    dispatcher = attested(server)
    sampling = replace(SAMPLING, seed=seed, unknown_ids=(99,))
    for _ in range(3):
        found = await dispatcher.submit(PROMPT, dispatcher.servers["http://a"], sampling)
        assert 99 not in found.token_ids
    assert [request.unknown_ids for request in server.requests] == sent
    assert dispatcher.attempts.num_failed == 0


@pytest.mark.parametrize(
    ("change", "unknown", "message"),
    [
        ({}, (99,), None),
        ({"token_ids": [1, 2, 3, 97]}, (98, 99), None),
        ({"token_ids": [1, 2, 3, 99]}, (), None),
        ({"token_ids": [98, 2, 99, 98]}, (98, 99), "3 of its 4 tokens, such as 98, are not in the"),
        ({"token_ids": [0, 1, 2, 3]}, (0, 50), "such as 0"),
        ({"token_ids": []}, (), "it has 0 tokens"),
        ({"token_ids": [100] * 4}, (), "its token ids are 100 to 100, expected 0 to 99"),
        ({"finish_reason": "abort"}, (), "it was aborted after 4 tokens"),
        ({"logprobs": -np.full(4, 9999, np.float32)}, (), "its logprobs must be finite"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(change, unknown, message):
    request = replace(SAMPLING, unknown_ids=unknown).request("r", PROMPT)
    if "token_ids" in change:
        change = {"token_ids": np.array(change["token_ids"], np.int32)}
    answer = replace(generation(), **change)
    if message is None:
        check_generation(answer, request, 100, "http://a")
    else:
        with pytest.raises(ServerError, match=rf"^http://a returned .*{message}"):
            check_generation(answer, request, 100, "http://a")


SEEDED = Sampling(8, 64, 1.0, 1.0, -1, (1,), seed=5)
SEVENTH = Prompt(7, "prompt", np.array([3, 4], np.int32), {})


def seed_of(sampling: Sampling = SEEDED, prompt: Prompt = SEVENTH, sample=0, written=0) -> int:
    seed = sampling.of_sample(prompt, sample, written).seed
    assert seed is not None and 0 <= seed < 2**31
    return seed


def test_each_part_of_each_sample_of_each_prompt_has_a_seed_of_its_own():
    others = {
        seed_of(sample=1), seed_of(written=1), seed_of(prompt=replace(SEVENTH, group_id=8)),
        seed_of(replace(SEEDED, seed=6)),
    }  # fmt: skip
    # In every process: a run that goes on must draw the same numbers.
    assert seed_of() == 1830465648
    assert len(others | {1830465648}) == 5
    assert replace(SEEDED, seed=None).of_sample(SEVENTH, 0, 0).seed is None


@pytest.mark.parametrize(("client", "name"), [(sglang, "sampling_seed"), (vllm, "seed")])
def test_servers_are_sent_the_seed(client, name):
    body = client.generate_body(SEEDED.of_sample(SEVENTH, 0, 0).request("id", SEVENTH))
    assert body["sampling_params"][name] == seed_of()
    body = client.generate_body(replace(SEEDED, seed=None).request("id", SEVENTH))
    assert body["sampling_params"].get(name) is None
