# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The utilization of the devices counts the work of the model, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.step_plan import plan_step
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training.utilization import Utilization
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

PROMPT = 2
LENGTHS = [3, 6]  # of completions
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 77, "vocab_size": 61}
HEADS, KV_HEADS = 6 * 8, 2 * 8  # channels
WEIGHTS = 3 * (48 * (2 * HEADS + 2 * KV_HEADS) + 3 * 48 * 77)
TOKENS = sum(PROMPT + length for length in LENGTHS)
PAIRS = sum((PROMPT + length) * (PROMPT + length + 1) // 2 for length in LENGTHS)
WEIGHT_FLOPS = 2 * WEIGHTS * TOKENS + 2 * 61 * 48 * sum(LENGTHS)
ATTENTION_FLOPS = 4 * 3 * HEADS * PAIRS


def rollout(reward: float, length: int) -> Rollout:
    ids = np.arange(length, dtype=np.int32)
    return Rollout(
        prompt_ids=np.arange(PROMPT, dtype=np.int32), token_ids=ids,
        logprobs=-ids.astype(np.float32), segments=(VersionSegment(0, 0, length),),
        finish_reason="stop", completion="", reward=reward,
    )  # fmt: skip


def plan_of(config: JobConfig, num_groups: int = 1) -> Any:
    """Groups of two rollouts, in rows of 16 tokens."""
    rollouts = tuple(rollout(float(i), length) for i, length in enumerate(LENGTHS))
    groups = [RolloutGroup(i, "a", rollouts, f"u{i}") for i in range(num_groups)]
    return plan_step(
        groups, config.grpo, num_ranks=1, row_len=16, local_batch_size=1,
        max_new_tokens=8, balance=True, cost=token_cost, row_bucket=1,
    )  # fmt: skip


@pytest.fixture
def measured(make_model):
    """Returns the FLOPs that are counted for one batch of two rollouts."""
    _, folder = make_model("llama", **SIZES)
    model = read_hf_model(folder)

    def measure(times=1, **settings):
        config = JobConfig()
        for key, value in settings.items():
            table, name = key.split("__")
            setattr(getattr(config, table), name, value)
        utilization = Utilization(config, model, num_ranks=4, peak_flops=0.25)
        for number in range(times):
            utilization.add(plan_of(config), begins_batch=number == 0)
        return utilization.metrics(step_seconds=2.0)["time/mfu"] * 2.0

    return measure


def test_a_step_of_training_counts_by_hand(measured):
    assert measured() == 3 * (WEIGHT_FLOPS + ATTENTION_FLOPS)
    assert measured(times=2) == 2 * measured(), "the parts of a batch add up"


def test_forward_passes_epochs_and_frozen_weights_count_as_they_are(measured):
    forward = WEIGHT_FLOPS + ATTENTION_FLOPS
    assert measured(grpo__kl_coef=0.1) == 4 * forward
    assert measured(grpo__num_epochs=2) == 7 * forward  # and the old policy's forward pass
    assert measured(grpo__num_epochs=2, grpo__old_policy="sampling") == 6 * forward
    assert measured(lora__rank=4) == 2 * WEIGHT_FLOPS + 3 * ATTENTION_FLOPS
    # A critic's values, and two epochs; none of them has an output layer.
    of_values = 7 * (forward - 2 * 61 * 48 * sum(LENGTHS))
    assert measured(grpo__num_epochs=2, grpo__advantage="gae") == 7 * forward + of_values


def test_a_minibatch_that_is_skipped_counts_for_the_forward_passes_alone(make_model):
    _, folder = make_model("llama", **SIZES)
    config = JobConfig()
    config.grpo.num_minibatches, config.grpo.kl_coef = 2, 0.1
    plan = plan_of(config, num_groups=2)
    utilization = Utilization(config, read_hf_model(folder), num_ranks=1, peak_flops=1.0)

    def counted(minibatch_tokens: list[int]) -> float:
        utilization.add(replace(plan, minibatch_tokens=minibatch_tokens), begins_batch=True)
        return utilization.metrics(step_seconds=1.0)["time/mfu"]

    whole, tokens = counted(plan.minibatch_tokens), sum(plan.minibatch_tokens)
    # The same scored tokens, so that only the sequences differ: 3 of 5 passes over one half are left out.
    assert counted([tokens, 0]) < whole
    of_both = WEIGHT_FLOPS - 2 * 61 * 48 * sum(LENGTHS) + ATTENTION_FLOPS
    assert whole - counted([tokens, 0]) == pytest.approx(3 * of_both, rel=0.2)
