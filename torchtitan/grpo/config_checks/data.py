# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lengths, minibatches, the supervised mix-in, and recorded rollouts."""

from torchtitan.grpo.config_checks.rules import check_file, get, require
from torchtitan.grpo.job_config import JobConfig


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest prompt with the longest completion."""
    seq_len, longest_prompt = config.training.seq_len, config.prompts.max_prompt_tokens
    if longest_prompt == 0:
        return seq_len
    return min(seq_len, longest_prompt + config.rollout.max_new_tokens)


def check_lengths(config: JobConfig) -> None:
    require(
        config.rollout.max_new_tokens < config.training.seq_len,
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) must leave room for a prompt "
        f"in training.seq_len ({config.training.seq_len}). Raise the one or lower the other.",
    )
    served, longest = config.inference.max_model_len, longest_sequence(config)
    require(
        served == 0 or served >= longest,
        f"inference.max_model_len must be 0 (training.seq_len) or at least {longest}, the longest "
        "prompt (prompts.max_prompt_tokens, or what training.seq_len leaves) with "
        f"rollout.max_new_tokens, got {served}.",
    )


def check_data(config: JobConfig) -> None:
    """Minibatches, the supervised mix-in, and recorded rollouts."""
    grpo, rollout = config.grpo, config.rollout
    require(
        rollout.record is None or rollout.replay is None,
        "Set rollout.record or rollout.replay, not both: what is replayed is recorded already, "
        f"got {rollout.record!r} and {rollout.replay!r}.",
    )
    check_file("rollout.replay", rollout.replay)
    if not config.prompts.single_rank_load:
        for key in ("rollout.record", "rollout.replay", "grpo.ptx_path"):
            require(
                get(config, key) is None,
                f"prompts.single_rank_load = false leaves the tokens in the rollout process, and "
                f"{key} has rank 0 read or write them, got {get(config, key)!r}. Leave one out.",
            )
    require(
        grpo.num_minibatches <= grpo.prompts_per_step or rollout.replay is not None,
        "grpo.num_minibatches must be at most grpo.prompts_per_step "
        f"({grpo.prompts_per_step}), since prompt groups stay whole, got {grpo.num_minibatches}.",
    )
    check_file("grpo.ptx_path", grpo.ptx_path)
    require(
        grpo.ptx_path is None or grpo.ptx_per_step >= grpo.num_minibatches,
        f"grpo.ptx_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), a "
        f"supervised row for each, got {grpo.ptx_per_step}.",
    )
    require(
        grpo.ptx_path is None or rollout.temperature == 1,
        f"grpo.ptx_path needs rollout.temperature = 1, got {rollout.temperature}: the trainer "
        "scores every token at that temperature, and supervised ones would be fitted to the "
        "tempered distribution, not to the model's own.",
    )
