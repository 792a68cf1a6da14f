# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server of each kind serves as a teacher.

It is the one of `test_real_servers.py`, before a test there gives it another directory: SGLang's
server names the newest one as its model, which has no tokenizer.
"""

import asyncio

import numpy as np
import pytest
import torch
from bare_trainer import (
    PROBE,
    VOCAB_SIZE,
    make_buckets,
    make_model,
    new_versions,
    tempered_logprobs,
    with_trainer,
)
from transformers import Qwen3ForCausalLM

from torchtitan.grpo.config import Teacher
from torchtitan.grpo.inference.client import MAX_TOP_TOKENS, InferenceClient
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.join_check import WrongServer
from torchtitan.grpo.rollout.teachers import TeacherNeeds, TeacherPool
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import TopTokens

pytestmark = pytest.mark.slow


@torch.no_grad()
def all_logprobs(
    model: Qwen3ForCausalLM, prompt: np.ndarray, completion: np.ndarray
) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def assert_most_likely(top: TopTokens, expected: torch.Tensor, top_k: int) -> None:
    assert top.ids.shape == (len(expected), top_k)
    # Sorted, so that tokens that are equally likely may change places.
    best = expected.topk(top_k).values.numpy()
    np.testing.assert_allclose(-np.sort(-top.logprobs, axis=1), best, atol=1e-3)
    # Each id is the one that has this logprob.
    of_ids = expected.gather(-1, torch.from_numpy(top.ids).long()).numpy()
    np.testing.assert_allclose(top.logprobs, of_ids, atol=1e-3)


@with_trainer
async def test_a_server_of_each_kind_rates_what_a_student_has_sampled(server, client, trainer):
    """As a teacher: each token of a completion, given all before it, at temperature 1.

    The most likely tokens are those of transformers, apart from ties.
    """
    random = np.random.default_rng(0)
    path = server.launched.spec.model_path
    vocabulary = TextCodec(path, ()).vocabulary()

    def teachers(client: InferenceClient, num_tokens: int, top_k: int = 0) -> TeacherPool:
        needs = TeacherNeeds(vocabulary, VOCAB_SIZE, num_tokens, None, top_k)
        settings = Teacher(urls=[client.url], kind=server.kind, top_k=top_k)
        return TeacherPool([client], settings, needs)

    model = make_model(15)
    await trainer.push(make_buckets(model, 2), next(new_versions))
    pool = teachers(client, 1023)
    await pool.start(60)
    pairs = [
        (random.integers(2, VOCAB_SIZE, n), random.integers(2, VOCAB_SIZE, 60 - n))
        for n in (1, 20, 40)
    ]
    together = await pool.rate(pairs)
    alone = await asyncio.gather(*(pool.rate([pair]) for pair in pairs))
    rated = zip(pairs, together, alone, strict=True)
    for (prompt, completion), (rating, _), ((single, _),) in rated:
        expected = tempered_logprobs(model, prompt.tolist(), completion, 1.0)
        np.testing.assert_allclose(rating, expected, atol=1e-3)
        np.testing.assert_allclose(rating, single, atol=1e-5, rtol=0)
    for top_k in (1, 32):  # more than vLLM tells by default
        pool = teachers(client, 1023, top_k)
        await pool.start(60)
        for (prompt, completion), (rating, top) in zip(pairs, await pool.rate(pairs), strict=True):
            expected = tempered_logprobs(model, prompt.tolist(), completion, 1.0)
            np.testing.assert_allclose(rating, expected, atol=1e-3)
            assert top is not None
            assert_most_likely(top, all_logprobs(model, prompt, completion), top_k)
    if server.kind == "vllm":
        more = MAX_TOP_TOKENS + 1
        with pytest.raises(RouteError, match=f"the {more} most .*--max-logprobs {more}"):
            await client.rate([PROBE], [1], more)
    with pytest.raises(WrongServer, match=r"takes at most 1024 tokens"):
        await teachers(client, 1024).start(60)
