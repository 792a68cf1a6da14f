# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks lengths, minibatches, the supervised mix-in, and recorded rollouts."""

from torchtitan.grpo.config_checks.rules import check_file, get, require
from torchtitan.grpo.job_config import JobConfig


def longest_sequence(config: JobConfig) -> int:
    """Returns the number of tokens of the longest prompt with the longest completion.

    In supervised training this is the longest example.
    """
    seq_len, longest_prompt = config.training.seq_len, config.prompts.max_prompt_tokens
    if config.sft.path is not None:
        return min(seq_len, config.sft.max_example_tokens or seq_len)
    if longest_prompt == 0:
        return seq_len
    return min(seq_len, longest_prompt + config.rollout.max_new_tokens)


def check_lengths(config: JobConfig) -> None:
    """Checks that prompts and completions fit into rows and into the servers' sequences."""
    if config.sft.path is not None:
        return  # examples that do not fit are left out
    require(
        config.rollout.max_new_tokens < config.training.seq_len,
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) must leave room for a prompt in "
        f"training.seq_len ({config.training.seq_len}). Lower rollout.max_new_tokens or raise "
        "training.seq_len.",
    )
    served, longest = config.inference.max_model_len, longest_sequence(config)
    require(
        served == 0 or served >= longest,
        f"inference.max_model_len must be 0 (training.seq_len) or at least {longest}, got {served}: "
        "servers must fit the longest prompt (prompts.max_prompt_tokens, or what training.seq_len "
        "leaves) with rollout.max_new_tokens.",
    )


def check_data(config: JobConfig) -> None:
    """Checks minibatches, the supervised mix-in, and recorded rollouts."""
    grpo, rollout = config.grpo, config.rollout
    require(
        rollout.record is None or rollout.replay is None,
        "Set rollout.record or rollout.replay, not both, because replayed rollouts are recorded "
        f"already, got {rollout.record!r} and {rollout.replay!r}.",
    )
    check_file("rollout.replay", rollout.replay)
    if not config.prompts.single_rank_load:
        for key in ("rollout.record", "rollout.replay", "grpo.ptx_path"):
            require(
                get(config, key) is None,
                f"prompts.single_rank_load = false and {key} = {get(config, key)!r} cannot be "
                "combined: the former leaves the tokens in the rollout process, and the latter needs "
                f"them on rank 0. Remove {key} or set prompts.single_rank_load = true.",
            )
    require(
        grpo.num_minibatches <= grpo.prompts_per_step or not config.has_servers,
        "grpo.num_minibatches must be at most grpo.prompts_per_step "
        f"({grpo.prompts_per_step}), because prompt groups stay whole, got {grpo.num_minibatches}.",
    )
    check_file("grpo.ptx_path", grpo.ptx_path)
    require(
        grpo.ptx_path is None or grpo.ptx_per_step >= grpo.num_minibatches,
        f"grpo.ptx_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), because "
        f"each minibatch needs a supervised example, got {grpo.ptx_per_step}.",
    )
    require(
        grpo.ptx_path is None or rollout.temperature == 1,
        f"grpo.ptx_path needs rollout.temperature = 1, got {rollout.temperature}: the trainer "
        "computes the log-probabilities of all tokens at that temperature, and supervised training "
        "would fit the tempered distribution instead of the model's own.",
    )
