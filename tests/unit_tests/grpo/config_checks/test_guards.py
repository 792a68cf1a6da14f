# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Guards that could never act, and limits that nothing reads, are refused."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

LIVE = [
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
    "--inference.launch",
]


def test_guards_are_set_on_the_command_line():
    guards = load_config([*LIVE, "--guards.nonfinite=stop", "--guards.grad_norm_limit=50"]).guards
    assert (guards.nonfinite, guards.grad_norm_limit) == ("stop", 50.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--guards.grad_norm=off", "--guards.grad_norm_limit=5"],
            "grad_norm_limit needs guards.grad",
        ),
        (
            ["--guards.entropy=off", "--guards.entropy_floor=1"],
            "entropy_floor needs guards.entropy",
        ),
        (["--guards.servers_lost=skip"], "servers_lost"),
        (["--guards.grad_norm=skip", "--guards.grad_norm_factor=0"], "got 0 for both"),
        (["--guards.entropy=stop", "--grpo.no-log_entropy"], "needs the entropy"),
        (["--guards.reference_kl=stop"], "needs a reference model"),
        (["--guards.equal_rewards=stop", "--observe.equal_rewards_steps=0"], "equal_rewards_steps"),
        (["--guards.max_skipped_steps=0"], "at least 1"),
    ],
)
def test_what_could_have_no_effect_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*LIVE, *settings])
