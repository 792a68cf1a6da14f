# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which rollouts wait, which are left out, and settings of it that contradict each other."""

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
        "rollout.max_head_offpolicyness above 0: in synchronous training every group is due",
        ("overdue",),
    ),
)


def check_filters(config: JobConfig) -> None:
    rollout, grpo = config.rollout, config.grpo
    check_read("rollout", rollout, _READ_WITH)
    batch = grpo.prompts_per_step * grpo.group_size
    limit = rollout.buffer_size_limit
    require(
        limit == 0 or limit >= batch,
        f"rollout.buffer_size_limit must be 0, or at least a batch (grpo.prompts_per_step * "
        f"grpo.group_size = {batch}), or no batch would ever be whole, got {limit}.",
    )
    require(
        rollout.min_completion_tokens <= rollout.max_new_tokens,
        f"rollout.min_completion_tokens must be at most rollout.max_new_tokens "
        f"({rollout.max_new_tokens}), or nothing would be kept, got "
        f"{rollout.min_completion_tokens}.",
    )
    require(
        not (rollout.dynamic_sampling and grpo.filter_zero_advantage),
        "rollout.dynamic_sampling and grpo.filter_zero_advantage both leave groups of equal "
        "rewards out, and what the first lets through beyond its limit the second would drop "
        "after all. Set one of them.",
    )
    require(
        rollout.overdue not in ("cut", "resume") or rollout.segment_tokens > 0,
        f'rollout.overdue = "{rollout.overdue}" keeps the segments that are written of a '
        "completion, and rollout.segment_tokens = 0 asks for whole ones. Set it to a part of "
        f"rollout.max_new_tokens ({rollout.max_new_tokens}).",
    )
    require(
        rollout.overdue not in ("cut", "resume") or rollout.environment is None,
        f'rollout.overdue = "{rollout.overdue}" ends or goes on with completions amid a turn, which '
        "rollout.environment has not read. Set rollout.overdue to wait or drop.",
    )
    if rollout.dynamic_sampling:
        require(
            grpo.group_size > 1,
            "rollout.dynamic_sampling compares the rewards of a group, and grpo.group_size = 1 "
            "leaves nothing to compare.",
        )
    if rollout.should_accept is not None:
        require(
            bool(rollout.should_accept.strip()),
            "rollout.should_accept must name a function, got an empty string. Leave it out.",
        )
