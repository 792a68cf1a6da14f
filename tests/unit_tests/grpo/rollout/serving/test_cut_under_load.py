# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A real embedded server is cut while it generates: no token is lost, doubled or changed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from embedded_process import VOCAB, Client, Server, make_model, save

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.system.child import stop_children
from torchtitan.grpo.types import Generation, Prompt

NUM_TOKENS, NUM_PROMPTS = 500, 12
# Two logits that differ by less may change their order with the batch in which they are computed.
TOLERANCE = 1e-3


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_path = save(make_model(1), tmp_path_factory.mktemp("model"))
    # A third of the requests wait, and are cut without a token.
    made = Server(tmp_path_factory.mktemp("server"), model_path, "--max-running-requests", "8")
    try:
        yield made.wait()
    finally:
        stop_children([made.process])


def assert_greedy(prompt: Prompt, whole: Generation) -> None:
    """Each token is the most likely one behind all tokens before it."""
    tokens = torch.from_numpy(np.concatenate([prompt.token_ids, whole.token_ids])).long()
    with torch.no_grad():
        logits = make_model(1)(tokens.unsqueeze(0)).logits[0, len(prompt.token_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)
    of_tokens = logprobs.gather(-1, torch.from_numpy(whole.token_ids).long().unsqueeze(-1))
    assert (logprobs.max(-1).values - of_tokens[:, 0]).max() < TOLERANCE
    torch.testing.assert_close(torch.from_numpy(whole.logprobs), of_tokens[:, 0], atol=1e-3, rtol=0)


async def test_completions_that_were_cut_thrice_are_those_of_an_uncut_server(server: Server):
    client, observer = make_client("embedded", server.url), Client(server.url)
    config = Rollout(request_timeout_seconds=60.0)
    dispatcher = Dispatcher([client], config, vocab_size=VOCAB)
    sampling = Sampling(NUM_TOKENS, 2000, 0.0, 1.0, -1, (), ignore_eos=True)
    writer = TrajectoryWriter(dispatcher, sampling, config)
    dispatcher.set_version(server.url, -1)  # the version of weights that nobody has pushed
    trajectories = [
        writer.start(
            Prompt(i, "", np.array([i, 3, i], np.int32), {}), dispatcher.servers[client.url]
        )
        for i in range(NUM_PROMPTS)
    ]
    num_cut = 0
    for _ in range(3):
        num_tokens = (await observer.get("/server_info"))["num_tokens"]
        await observer.until(lambda info, n=num_tokens: info["num_tokens"] > n + 200)
        num_cut += await dispatcher.cut(client.url)
        info = await observer.get("/server_info")
        assert info["num_running"] == info["num_waiting"] == 0
        dispatcher.admit(client.url)
        dispatcher.set_version(client.url, -1)
    for trajectory in trajectories:
        whole = await trajectory.task
        assert len(whole.token_ids) == NUM_TOKENS and whole.finish_reason == "length"
        assert_greedy(trajectory.prompt, whole)
    # What was answered is not generated again.
    generated = (await observer.get("/server_info"))["num_tokens"]
    assert generated == dispatcher.attempts.num_tokens == NUM_TOKENS * NUM_PROMPTS
    assert num_cut == dispatcher.num_cut == 3 * NUM_PROMPTS
    assert dispatcher.attempts.num_failed == dispatcher.in_flight == 0
    await client.close()
