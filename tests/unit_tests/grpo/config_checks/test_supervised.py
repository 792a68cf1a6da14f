# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of supervised training."""

import pytest

from torchtitan.grpo import cli
from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_checks.description import describe_plan
from torchtitan.grpo.config_manager import load_config


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "examples.jsonl"
    path.write_text("{}\n")
    return ["--model.hf_assets_path=model", f"--sft.path={path}"]


def test_supervised_training_needs_no_prompts_rewards_or_servers(arguments):
    text = describe_plan(load_config(arguments))
    assert "servers: none, the run is trained on the examples of" in text
    assert "global batch: 32 examples" in text
    # What is set for a run on rollouts may stay.
    load_config([*arguments, "--inference.launch", "--reward.functions=exact_match"])
    with pytest.raises(ConfigError, match=r"reward\.functions must name"):
        load_config(arguments[:1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sft.path=/no/file.jsonl"], r"sft\.path must be a file, got /no/file\.jsonl"),
        (["--sft.held_out_path=/no/file.jsonl"], r"sft\.held_out_path must be a file"),
        (["--sft.held_out_interval=5"], r"sft\.held_out_interval needs sft\.held_out_path"),
        (["--grpo.kl_coef=0.1"], r"sft\.path and grpo\.kl_coef above 0 cannot be combined"),
        (["--rollout.stream"], r"sft\.path and rollout\.stream = true cannot be combined"),
        (["--grpo.num_epochs=2"], r"sft\.path and grpo\.num_epochs above 1 cannot"),
        (["--rollout.record=x.jsonl"], r"sft\.path and rollout\.record cannot be combined"),
        (["--rollout.temperature=0.7"], r"sft\.path needs rollout\.temperature = 1, got 0\.7"),
        (
            ["--grpo.num_minibatches=4", "--sft.examples_per_step=3"],
            r"sft\.examples_per_step must be at least grpo\.num_minibatches \(4\).*got 3",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, more, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*arguments, *more])


def test_settings_of_examples_need_examples():
    with pytest.raises(ConfigError, match=r"sft\.examples_per_step needs sft\.path"):
        load_config(
            ["--model.hf_assets_path=model", "--prompts.path=p.jsonl", "--inference.launch",
             "--reward.functions=exact_match", "--sft.examples_per_step=4"]
        )  # fmt: skip


def test_the_command_needs_examples(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert cli.run(["sft", "train_configs/quickstart.toml"]) == 2
    assert "torchtitan-grpo sft needs sft.path" in capsys.readouterr().err
