# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of batches that come in parts."""

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.stream_parts=3"], r"stream_parts needs rollout\.stream = true"),
        (["--rollout.stream", "--rollout.stream_parts=5"], r"at most grpo.* \(4\).* got 5"),
        (["--rollout.stream", "--rollout.stream_parts=1"], r"at least 2, got 1"),
        (
            ["--rollout.stream", "--grpo.num_minibatches=2"],
            r"num_minibatches = 2 cannot be combined",
        ),
        (["--rollout.stream", "--grpo.num_epochs=2"], r"grpo\.num_epochs = 2 cannot be combined"),
        (["--rollout.stream", "--grpo.advantage=batch_norm"], r'"batch_norm" cannot be combined'),
        (
            ["--rollout.stream", "--grpo.advantage_length_power=1"],
            r"length_power = 1 cannot be combined",
        ),
        (
            ["--rollout.stream", "--prompts.no-single-rank-load"],
            r"single_rank_load = false cannot be combined",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*BASE, *arguments])


def test_batches_may_come_in_parts():
    rollout = load_config([*BASE, "--rollout.stream", "--rollout.stream_parts=2"]).rollout
    assert (rollout.stream, rollout.stream_parts) == (True, 2)
