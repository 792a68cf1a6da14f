# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings that must be there, must not be there, or must lie in a range."""

from torchtitan.grpo.config_checks.rules import get, require
from torchtitan.grpo.job_config import JobConfig


def check_required(config: JobConfig) -> None:
    require(
        bool(config.model.hf_assets_path),
        "model.hf_assets_path must name a Hugging Face model directory, got nothing.",
    )
    require(
        (config.model.name, config.model.flavor) == ("huggingface", "directory"),
        f"model.name and model.flavor are not used: the model is read from "
        f"model.hf_assets_path. Remove them (got {config.model.name!r}, {config.model.flavor!r}).",
    )
    if config.rollout.replay is not None:
        return  # nothing is asked or scored
    require(
        bool(config.reward.functions), "reward.functions must name at least one function, got none."
    )
    weights = config.reward.weights
    require(
        not weights or len(weights) == len(config.reward.functions),
        f"reward.weights must have one entry for each of the {len(config.reward.functions)} "
        f"reward.functions, got {len(weights)}.",
    )


_REFUSED = {
    "validation.enable": "held-out prompts are decoded and scored by [evaluation]",
    "checkpoint.create_seed_checkpoint": "a run begins with the weights of model.hf_assets_path",
    "training.enable_cpu_offload": "weights are pushed from the device that they are trained on",
    "memory_estimation.enable": "only torchtitan's own estimation script reads it",
    "fault_tolerance.enable": "the weight push knows a single group of ranks",
    "model.converters": "servers are given plain weights and do not round as a converted model "
    "(float8, mx) does, so their logprobs would not be those of the trainer's policy",
}
"""Torchtitan's keys that would be ignored here, or fail later, and why."""


def check_refused(config: JobConfig) -> None:
    for key, reason in _REFUSED.items():
        value = get(config, key)
        require(not value, f"{key} must be left at its default, got {value!r}: {reason}.")


_MINIMA = {
    "grpo.group_size": (1, "a prompt needs a completion"),
    "grpo.prompts_per_step": (1, "a step needs a prompt"),
    "grpo.num_minibatches": (1, "a batch needs an optimizer step"),
    "grpo.num_epochs": (1, "a batch is gone through at least once"),
    "grpo.ptx_coef": (0, "a negative weight would unlearn the mix-in"),
    "grpo.ptx_per_step": (1, "leave grpo.ptx_path out to mix nothing in"),
    "grpo.kl_coef": (0, "a negative penalty would reward drifting away"),
    "grpo.entropy_coef": (0, "a negative bonus would reward collapse"),
    "grpo.advantage_length_power": (0, "0 is off"),
    "grpo.reward_positive_scale": (0, "a negative factor would turn rewards around"),
    "grpo.reward_negative_scale": (0, "a negative factor would turn rewards around"),
    "grpo.overlong_buffer": (0, "0 is off"),
    "grpo.overlong_penalty": (0, "a negative penalty would reward length"),
    "grpo.aggregation_length": (0, "0 is rollout.max_new_tokens"),
    "grpo.importance_floor": (0, "0 is none"),
    "grpo.logprob_chunk_tokens": (1, "a chunk needs a token"),
    "grpo.hf_export_interval": (0, "0 exports at the end only"),
    "rollout.max_head_offpolicyness": (0, "0 is synchronous training"),
    "rollout.max_new_tokens": (1, "a completion needs a token"),
    "rollout.segment_tokens": (0, "0 asks for whole completions"),
    "rollout.max_turns": (1, "an episode needs a turn"),
    "rollout.environment_workers": (1, "somebody must run environments"),
    "rollout.buffer_size_limit": (0, "0 is twice a batch"),
    "rollout.min_completion_tokens": (0, "0 keeps all"),
    "rollout.dynamic_sampling_limit": (0, "0 leaves nothing out"),
    "rollout.max_process_restarts": (0, "0 is never"),
    "prompts.row_bucket": (1, "1 is whole microbatches"),
    "prompts.max_prompt_tokens": (0, "0 is what rollout.max_new_tokens leaves"),
    "inference.max_model_len": (0, "0 is training.seq_len"),
    "rollout.max_consecutive_failures": (1, "some failure must be the last"),
    "reward.num_workers": (1, "somebody must score"),
    "reward.max_consecutive_failures": (1, "some failure must be the last"),
    "inference.num_servers": (1, "somebody must generate"),
    "inference.max_restarts": (0, "0 is never"),
    "weight_sync.num_slots": (2, "one is being sent, one is being filled"),
    "weight_sync.bucket_bytes": (1, "a bucket needs room"),
    "weight_sync.max_versions": (0, "0 is as many as the servers ask for"),
    "weight_sync.attest_every": (0, "0 compares the server's version alone"),
    "weight_sync.attest_tolerance": (0, "0 is what the wire dtype allows"),
    "evaluation.num_prompts": (0, "0 evaluates all rows"),
    "evaluation.interval": (0, "0 evaluates before and after the run only"),
    "observe.samples_per_step": (0, "0 writes none"),
    "training.steps": (1, "a run needs a step"),
    "training.local_batch_size": (1, "a microbatch needs a row"),
}
_POSITIVE = (
    "grpo.clip_high",
    "grpo.importance_cap",
    "grpo.advantage_eps",
    "grpo.stop_timeout_seconds",
    "rollout.temperature",
    "rollout.request_timeout_seconds",
    "rollout.batch_timeout_seconds",
    "rollout.environment_timeout_seconds",
    "inference.startup_timeout_seconds",
    "inference.control_timeout_seconds",
    "inference.restart_seconds",
    "weight_sync.timeout_seconds",
    "weight_sync.push_timeout_seconds",
    "weight_sync.retry_seconds",
    "weight_sync.max_retry_seconds",
    "reward.timeout_seconds",
)


def check_ranges(config: JobConfig) -> None:
    for key, (minimum, reason) in _MINIMA.items():
        value = get(config, key)
        require(value >= minimum, f"{key} must be at least {minimum} ({reason}), got {value}.")
    for key in _POSITIVE:
        value = get(config, key)
        require(value > 0, f"{key} must be above 0, got {value}.")
    clip_low, top_p = config.grpo.clip_low, config.rollout.top_p
    require(0 <= clip_low < 1, f"grpo.clip_low must be in [0, 1), got {clip_low}.")
    for key in ("grpo.mismatch_veto", "grpo.ref_model_ema"):
        value = get(config, key)
        require(0 <= value < 1, f"{key} must be in [0, 1), 0 for off, got {value}.")
    dual_clip = config.grpo.dual_clip
    require(
        dual_clip == 0 or dual_clip > 1,
        f"grpo.dual_clip must be 0 (off) or above 1, got {dual_clip}.",
    )
    require(0 < top_p <= 1, f"rollout.top_p must be in (0, 1], got {top_p}.")
    top_k = config.rollout.top_k
    require(
        top_k == -1 or top_k >= 1, f"rollout.top_k must be -1 (off) or at least 1, got {top_k}."
    )
    concurrent = config.rollout.max_concurrent_rollouts
    require(
        concurrent >= config.grpo.group_size,
        f"rollout.max_concurrent_rollouts must be at least grpo.group_size "
        f"({config.grpo.group_size}), or no group could ever start, got {concurrent}.",
    )
