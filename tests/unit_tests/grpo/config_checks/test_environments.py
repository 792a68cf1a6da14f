# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of environments."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

LIVE = [
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=environment",
    "--inference.launch",
]


@pytest.mark.parametrize("name", ["calculator", "mine:Game", "package.module.Game", "a/b.py:Game"])
def test_an_environment_is_named_as_functions_are(name):
    config = load_config([*LIVE, f"--rollout.environment={name}", "--rollout.max_turns=3"])
    assert (config.rollout.environment, config.rollout.max_turns) == (name, 3)


def test_options_of_any_kind_come_from_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[rollout]\nenvironment = 'mine:Game'\n"
        "environment_options = { size = 3, names = ['a'], is_hard = true }\n"
    )
    config = load_config([f"--job.config_file={file}", *LIVE])
    assert config.rollout.environment_options == {"size": 3, "names": ["a"], "is_hard": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"the built-in 'environment', .* rollout\.environment is not set"),
        (["--rollout.environment=abacus"], r"must be package\.module:function.*calculator"),
        (["--rollout.max_turns=3"], r"rollout\.max_turns needs rollout\.environment"),
        (
            ["--rollout.environment=calculator", "--rollout.max_turns=0"],
            r"rollout\.max_turns must be at least 1",
        ),
        (
            ["--rollout.environment=calculator", "--rollout.environment_timeout_seconds=0"],
            r"rollout\.environment_timeout_seconds must be above 0",
        ),
        (["--rollout.environment=verifiers"], r"needs rollout\.environment_options = .*env_id"),
        (
            ["--rollout.environment=calculator", "--rollout.ignore_eos"],
            r"rollout\.ignore_eos needs rollout\.stop_token_ids",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*LIVE, *arguments])
