# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of filters, and of what waits to be trained on."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

BASE = [
    "--model.hf_assets_path=model",
    "--reward.functions=exact_match",
    "--inference.launch",
    "--prompts.path=owner/set",
    "--grpo.prompts_per_step=4",
    "--grpo.group_size=8",
]
ENVIRONMENT = ["--rollout.environment=calculator"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.buffer_size_limit=31"], r"buffer_size_limit must be 0 .* = 32\), got 31"),
        (
            ["--rollout.buffer_size_limit=-1"],
            r"buffer_size_limit must be at least 1, or 0 \(twice a batch\), got -1",
        ),
        (["--rollout.min_completion_tokens=257"], r"at most rollout\.max_new_tokens \(256\)"),
        (["--rollout.dynamic_sampling_limit=2"], r"needs rollout\.dynamic_sampling = true"),
        (
            ["--rollout.dynamic_sampling", "--grpo.filter_zero_advantage"],
            r"rollout\.dynamic_sampling and grpo\.filter_zero_advantage cannot be",
        ),
        (
            ["--rollout.overdue=drop", "--rollout.max_head_offpolicyness=0"],
            r"rollout\.overdue needs rollout\.max_head_offpolicyness above 0",
        ),
        (["--rollout.overdue=cut"], r'overdue = "cut" keeps the finished segments'),
        (["--rollout.overdue=resume"], r'overdue = "resume" keeps the finished segments'),
        (
            ["--rollout.overdue=resume", "--rollout.segment_tokens=4", *ENVIRONMENT],
            r'overdue = "resume" interrupts completions in the middle of a turn',
        ),
        (
            ["--rollout.overdue=cut", "--rollout.segment_tokens=4", *ENVIRONMENT],
            r'overdue = "cut" interrupts completions in the middle of a turn',
        ),
        (["--rollout.should_accept= "], r"should_accept must name a function"),
    ],
)
def test_filters_that_cannot_hold_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*BASE, *arguments])


def test_filters_that_go_together_are_taken():
    rollout = load_config(
        [
            *BASE,
            "--rollout.buffer_size_limit=32",
            "--rollout.dynamic_sampling",
            "--rollout.dynamic_sampling_limit=2",
            "--rollout.overdue=drop",
            "--rollout.drop_truncated",
            "--rollout.should_accept=mine.py:keep",
        ]
    ).rollout
    assert (rollout.buffer_size_limit, rollout.dynamic_sampling_limit) == (32, 2.0)
