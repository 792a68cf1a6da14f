# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks which rollouts wait for the trainer and which are left out."""

from torchtitan.grpo.config_checks.rules import check_read, require
from torchtitan.grpo.job_config import JobConfig

_READ_WITH = (
    (
        lambda rollout: rollout.dynamic_sampling,
        "rollout.dynamic_sampling = true",
        ("dynamic_sampling_limit",),
    ),
    (
        lambda rollout: rollout.max_head_offpolicyness > 0,
        "rollout.max_head_offpolicyness above 0 (in synchronous training no group can wait)",
        ("overdue",),
    ),
)


def check_filters(config: JobConfig) -> None:
    """Refuses filters and buffers under which no batch could be made, or that exclude each other."""
    rollout, grpo = config.rollout, config.grpo
    check_read("rollout", rollout, _READ_WITH)
    batch = grpo.prompts_per_step * grpo.group_size
    limit = rollout.buffer_size_limit
    require(
        limit == 0 or limit >= batch,
        "rollout.buffer_size_limit must be 0 (twice a batch) or at least one batch "
        f"(grpo.prompts_per_step * grpo.group_size = {batch}), got {limit}: a smaller buffer could "
        "never hold a whole batch.",
    )
    require(
        rollout.min_completion_tokens <= rollout.max_new_tokens,
        f"rollout.min_completion_tokens must be at most rollout.max_new_tokens "
        f"({rollout.max_new_tokens}), got {rollout.min_completion_tokens}: no completion would be "
        "kept.",
    )
    require(
        not (rollout.dynamic_sampling and grpo.filter_zero_advantage),
        "rollout.dynamic_sampling and grpo.filter_zero_advantage cannot be combined: both leave out "
        "groups with equal rewards, and groups that the former keeps because of its limit would be "
        "dropped by the latter. Set one of them.",
    )
    require(
        rollout.overdue not in ("cut", "resume") or rollout.segment_tokens > 0,
        f'rollout.overdue = "{rollout.overdue}" keeps the finished segments of a completion, but '
        "with rollout.segment_tokens = 0 completions are generated whole. Set "
        f"rollout.segment_tokens below rollout.max_new_tokens ({rollout.max_new_tokens}).",
    )
    require(
        rollout.overdue not in ("cut", "resume") or rollout.environment is None,
        f'rollout.overdue = "{rollout.overdue}" interrupts completions in the middle of a turn and '
        'cannot be combined with rollout.environment. Set rollout.overdue to "wait" or "drop".',
    )
    if rollout.dynamic_sampling:
        require(
            grpo.group_size > 1,
            "rollout.dynamic_sampling compares the rewards of a group and needs grpo.group_size of "
            "at least 2, got 1.",
        )
    if rollout.should_accept is not None:
        require(
            bool(rollout.should_accept.strip()),
            "rollout.should_accept must name a function, got an empty string. Name one, or remove it.",
        )
