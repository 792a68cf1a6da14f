# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that a batch may be handed to the trainer in parts."""

from torchtitan.grpo.config_checks.rules import check_read, require
from torchtitan.grpo.job_config import JobConfig

_READ_WITH = ((lambda rollout: rollout.stream, "rollout.stream = true", ("stream_parts",)),)


def check_stream(config: JobConfig) -> None:
    """Refuses ``rollout.stream`` with settings that need the whole batch before its gradient."""
    rollout, grpo = config.rollout, config.grpo
    check_read("rollout", rollout, _READ_WITH)
    if not rollout.stream:
        return
    most = grpo.prompts_per_step
    require(
        rollout.stream_parts <= most,
        f"rollout.stream_parts must be at most grpo.prompts_per_step ({most}), because prompt groups "
        f"stay whole, got {rollout.stream_parts}. Lower it, or leave rollout.stream at false.",
    )
    needs_all = {
        f"grpo.num_minibatches = {grpo.num_minibatches}": grpo.num_minibatches > 1,
        f"grpo.num_epochs = {grpo.num_epochs}": grpo.num_epochs > 1,
        'grpo.advantage = "batch_norm"': grpo.advantage == "batch_norm",
        f"grpo.advantage_length_power = {grpo.advantage_length_power:g}": (
            grpo.advantage_length_power > 0
        ),
        "grpo.ptx_path": grpo.ptx_path is not None,
        "grpo.mismatch_normalize = true": grpo.mismatch_normalize,
        "prompts.single_rank_load = false": not config.prompts.single_rank_load,
    }
    for setting, is_set in needs_all.items():
        require(
            not is_set,
            f"rollout.stream and {setting} cannot be combined: the former computes gradients before "
            "the batch is complete, and the latter needs the whole batch first. Remove one of them.",
        )
