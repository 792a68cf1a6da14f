# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Seeds of requests: they follow the prompt and the sample, not what a server did before."""

from dataclasses import replace

import numpy as np
import pytest

from torchtitan.grpo.inference.sglang import client as sglang
from torchtitan.grpo.inference.vllm import answers as vllm
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import Prompt

PROMPT = Prompt(7, "prompt", np.array([3, 4], np.int32), {})
SAMPLING = Sampling(8, 64, 1.0, 1.0, -1, (1,), seed=5)


def seed_of(sampling: Sampling = SAMPLING, prompt: Prompt = PROMPT, sample=0, written=0) -> int:
    seed = sampling.of_sample(prompt, sample, written).seed
    assert seed is not None and 0 <= seed < 2**31
    return seed


def test_each_part_of_each_sample_of_each_prompt_has_a_seed_of_its_own():
    others = [
        seed_of(sample=1),
        seed_of(written=1),
        seed_of(prompt=replace(PROMPT, group_id=8)),
        seed_of(replace(SAMPLING, seed=6)),
    ]
    assert len({seed_of(), *others}) == 5
    # In every process: a run that goes on must draw the same numbers.
    assert seed_of() == 1830465648 == seed_of()


def test_without_a_seed_the_servers_numbers_are_used():
    sampling = replace(SAMPLING, seed=None)
    assert sampling.of_sample(PROMPT, 0, 0).seed is None


@pytest.mark.parametrize(("client", "name"), [(sglang, "sampling_seed"), (vllm, "seed")])
def test_servers_are_sent_the_seed(client, name):
    body = client.generate_body(SAMPLING.of_sample(PROMPT, 0, 0).request("id", PROMPT))
    assert body["sampling_params"][name] == seed_of()
    body = client.generate_body(replace(SAMPLING, seed=None).request("id", PROMPT))
    assert body["sampling_params"].get(name) is None
