# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of tables on the page of ``--help``, and the headings inside of long tables."""

# This project's tables, in the order in which a new user meets them. Tables that are missing here
# follow, and torchtitan's come last.
FIRST_TABLES = (
    "model",
    "prompts",
    "reward",
    "evaluation",
    "grpo",
    "rollout",
    "inference",
    "weight_sync",
    "teacher",
    "sft",
    "guards",
    "workers",
    "observe",
)

# Torchtitan's tables that nearly every run sets, which come before its others.
OFTEN_SET = ("job", "training", "optimizer", "lr_scheduler", "parallelism", "checkpoint", "debug")

HEADINGS: dict[str, str] = {
    "model.hf_assets_path": "The model",
    "prompts.path": "Prompts",
    "prompts.single_rank_load": "How a batch is spread over ranks",
    "reward.functions": "Rewards",
    "evaluation.path": "Evaluation on held-out prompts",
    "grpo.group_size": "The batch",
    "grpo.advantage": "Advantages and shaped rewards",
    "grpo.policy_loss": "Policy loss",
    "grpo.old_policy": "Correction of the servers' log-probabilities",
    "grpo.kl_coef": "KL penalty and reference model",
    "grpo.entropy_coef": "Entropy bonus and supervised examples",
    "grpo.logprob_chunk_tokens": "Memory, speed, export and the end of a run",
    "rollout.max_head_offpolicyness": "Staleness and sampling",
    "rollout.segment_tokens": "Environments and long completions",
    "rollout.buffer_size_limit": "Batches and filters",
    "rollout.max_process_restarts": "Dispatch and failures",
    "rollout.record": "Record and replay",
    "inference.kind": "Servers",
    "weight_sync.transport": "How weights reach the servers",
    "teacher.urls": "Distillation from a teacher",
    "sft.path": "Supervised training in place of rollouts",
    "guards.nonfinite": "What happens when a run goes wrong",
    "workers.pass_variables": "Processes that run your code",
    "observe.samples_per_step": "What a run prints and writes",
}
"""Heading that stands before a setting, by the setting's key."""
