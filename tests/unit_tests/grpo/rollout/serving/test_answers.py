# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Answers that are refused, or that wait until the weights they were written under are attested."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_server import PROMPT, SAMPLING, LocalServer, generation, in_loop, make, submit

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import check_generation
from torchtitan.grpo.types import GenerateRequest, Generation, VersionSegment


async def written_ahead(server: LocalServer, dispatcher: Dispatcher) -> asyncio.Task[Generation]:
    """A completion that was written under version 4 of a server that is attested with 3."""

    async def answer(request: GenerateRequest) -> Generation:
        return generation(4 if len(server.requests) == 1 else 5)

    server.answer = answer
    dispatcher.set_version(server.url, 3)
    task = submit(dispatcher, server.url)
    await asyncio.sleep(0.05)
    assert server.requests
    assert not task.done()
    return task


@in_loop
async def test_completion_under_weights_not_yet_attested_waits_for_that():
    server = LocalServer("http://a")
    dispatcher = make(server)
    task = await written_ahead(server, dispatcher)
    dispatcher.set_version("http://a", 4)
    assert (await task).segments[0].version == 4
    assert len(server.requests) == 1


@in_loop
async def test_completion_under_weights_that_turn_out_wrong_is_generated_again():
    server = LocalServer("http://a")
    dispatcher = make(server)
    task = await written_ahead(server, dispatcher)
    dispatcher.set_lost("http://a", "its logprobs are not the trainer's")
    dispatcher.set_version("http://a", 5)
    assert (await task).segments[0].version == 5
    assert len(server.requests) == 2


@in_loop
async def test_completion_under_weights_that_nobody_attests_fails_at_its_timeout():
    server = LocalServer("http://a")
    dispatcher = make(server, request_timeout_seconds=0.5)
    task = await written_ahead(server, dispatcher)
    with pytest.raises(ServerError, match="version 5, which was not attested within"):
        await task
    assert dispatcher.num_failed_requests == len(server.requests) == 2
    assert "version 5, which was not attested within" in dispatcher.last_error


@in_loop
async def test_server_that_answers_with_older_weights_than_attested_gets_no_more_work():
    server = LocalServer("http://a")
    dispatcher = make(server)
    dispatcher.set_version("http://a", 4)
    await submit(dispatcher, "http://a")
    assert dispatcher.choose(lambda version: True) is None


@pytest.mark.parametrize(
    ("ids", "unknown", "message"),
    [
        ([1, 2, 3, 99], (99,), "1 of its 4 tokens, such as 99, are not in the tokenizer"),
        ([98, 2, 99, 98], tuple(range(98, 100)), "3 of its 4 tokens, such as 98"),
        ([1, 50, 3, 4], (50, 98, 99), "such as 50"),
        ([0, 1, 2, 3], (0,), "such as 0"),
        ([99, 1, 2, 3], (99,), "such as 99"),
        ([1, 2, 3, 97], (98, 99), None),
        ([1, 2, 3, 99], (), None),
    ],
)
def test_an_answer_with_a_token_that_the_tokenizer_does_not_have_is_refused(ids, unknown, message):
    request = replace(SAMPLING, unknown_ids=unknown).request("r", PROMPT)
    answer = replace(generation(), token_ids=np.array(ids, np.int32))
    if message is None:
        check_generation(answer, request, 100, "http://a")
    else:
        with pytest.raises(ServerError, match=rf"^http://a returned .*{message}"):
            check_generation(answer, request, 100, "http://a")


@pytest.mark.parametrize(
    ("seed", "samples_unknown", "sent"),
    [
        (None, False, [(), (), ()]),  # a trained model pays nothing
        (None, True, [(), (99,), (99,), (99,)]),
        (7, False, [(99,), (99,), (99,)]),
        (7, True, [(99,), (99,), (99,)]),
    ],
)
@in_loop
async def test_ids_that_are_no_token_are_excluded_once_one_was_sampled(seed, samples_unknown, sent):
    async def answer(request: GenerateRequest) -> Generation:
        found = generation(4)
        if samples_unknown and not request.unknown_ids:
            found.token_ids[-1] = 99
        return found

    server = LocalServer("http://a", answer)
    dispatcher = make(server)
    dispatcher.set_version("http://a", 4)
    sampling = replace(SAMPLING, seed=seed, unknown_ids=(99,))
    for _ in range(3):
        found = await dispatcher.submit(PROMPT, dispatcher.servers["http://a"], sampling)
        assert 99 not in found.token_ids
    assert [request.unknown_ids for request in server.requests] == sent
    assert dispatcher.num_failed_requests == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "abort"}, "it was aborted after 4 tokens"),
        ({"token_ids": np.array([], np.int32)}, "it has 0 tokens"),
        (
            {"token_ids": np.full(4, 100, np.int32)},
            "its token ids are 100 to 100, expected 0 to 99",
        ),
        ({"logprobs": np.full(4, np.nan, np.float32)}, "its logprobs must be finite"),
        *(
            ({"logprobs": np.array([-1, -1, value, -1], np.float32)}, "got .* at token 2")
            for value in (-87.4, -100, -9999, -np.inf, 0.1, 1e30)
        ),
        ({"logprobs": -np.ones(3, np.float32)}, "its 3 logprobs"),
        ({"segments": (VersionSegment(-2, 0, 4),)}, "do not cover"),
        ({"segments": ()}, "do not cover 4 tokens"),
        ({"segments": (VersionSegment(0, 0, 3),)}, "do not cover 4 tokens"),
        ({"segments": (VersionSegment(0, 0, 1), VersionSegment(1, 2, 4))}, "do not cover"),
    ],
)
def test_answer_that_cannot_be_trained_on_is_refused(change: dict[str, Any], message: str):
    request = SAMPLING.request("r", PROMPT)
    check_generation(generation(), request, 100, "http://a")
    check_generation(
        replace(generation(), segments=(VersionSegment(0, 0, 1), VersionSegment(1, 1, 4))),
        request,
        100,
        "http://a",
    )
    with pytest.raises(ServerError, match=message):
        check_generation(replace(generation(), **change), request, 100, "http://a")
