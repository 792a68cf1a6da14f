# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Samples the batch on which `layout_parity.py --model DIRECTORY` trains."""

from typing import Any

import numpy as np
from engine_harness import harness
from replay_settings import rollout

from torchtitan.grpo.types import RolloutGroup

QUESTIONS = ("What is 90 plus 8?", "Name three colors.")
NUM_COMPLETIONS = 4
MAX_TOKENS = 24
SETTINGS: dict[str, Any] = {
    "training.seq_len": 126,  # a multiple of 3 for TP x3; too short for a prompt and its four completions
    "rollout.max_new_tokens": MAX_TOKENS,
    "grpo.prompts_per_step": len(QUESTIONS),
    "optimizer.lr": 1e-5,
}


def sampled_groups(model: Any, tokenizer: Any) -> list[RolloutGroup]:
    """Samples completions with the embedded engine; their rewards are random."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    with harness(model, max_slots=len(QUESTIONS) * NUM_COMPLETIONS) as engine:
        requests = [
            engine.submit(
                prompt, max_new_tokens=MAX_TOKENS, sampling_seed=seed,
                stop_token_ids=frozenset({tokenizer.eos_token_id}),
            )
            for prompt in prompts
            for seed in range(NUM_COMPLETIONS)
        ]  # fmt: skip
        engine.finish(requests)
    random = np.random.default_rng(0)
    rollouts = [
        rollout(
            np.array(request.prompt_ids, np.int32), np.array(request.output_ids, np.int32),
            np.array(request.logprobs), version=0, reward=float(random.normal()),
        )
        for request in requests
    ]  # fmt: skip
    return [
        RolloutGroup(
            i, "", tuple(rollouts[i * NUM_COMPLETIONS :][:NUM_COMPLETIONS]), "http://127.0.0.1:1"
        )
        for i in range(len(QUESTIONS))
    ]
