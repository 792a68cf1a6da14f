# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of other projects are answered with what the setting is called here."""

import re

import pytest

from torchtitan.grpo.command_line.errors import ConfigError
from torchtitan.grpo.command_line.keys import all_keys, all_tables
from torchtitan.grpo.command_line.other_names import OTHER_NAMES, OTHER_TABLES, answer_to
from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.job_config import JobConfig

KEYS, TABLES = all_keys(JobConfig), all_tables(JobConfig)


def test_every_answer_names_settings_that_there_are():
    for name, answer in {**OTHER_NAMES, **OTHER_TABLES}.items():
        for key in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", answer):
            is_setting = key in KEYS or key in ("samples.jsonl", "torchtitan.grpo")
            assert is_setting, f"{name}: {key}"
        for table in re.findall(r"\[([a-z_]+)\]", answer):
            assert table in TABLES, f"{name}: {table}"


def test_no_name_hides_a_setting_of_ours():
    assert not set(OTHER_NAMES) & set(KEYS)
    assert not (set(OTHER_NAMES) | set(OTHER_TABLES)) & set(TABLES)


@pytest.mark.parametrize(
    ("text", "key", "answer"),
    [
        ("[grpo]\nbeta = 0.1", "grpo.beta", "grpo.kl_coef"),
        ("[optimizer]\nlearning_rate = 1e-6", "optimizer.learning_rate", "optimizer.lr"),
        ("[grpo]\nnum_generations = 8", "grpo.num_generations", "grpo.group_size"),
        ("[rollout]\nmax_completion_length = 8", "rollout.max_completion_length", "max_new_tokens"),
        ("[grpo]\nepsilon = 0.2", "grpo.epsilon", "grpo.clip_low and grpo.clip_high"),
        ("[grpo]\nepsilon_high = 0.2", "grpo.epsilon_high", "grpo.clip_high"),
        ("[grpo]\nloss_type = 'dapo'", "grpo.loss_type", "grpo.aggregation"),
        ("[grpo]\nscale_rewards = false", "grpo.scale_rewards", "group_mean"),
        ("[inference]\nvllm_mode = 'colocate'", "inference.vllm_mode", "inference.launch"),
        ("[model]\nlora_rank = 8", "model.lora_rank", "lora.rank"),
        ("[peft_config]\nr = 8", "peft_config", "[lora]"),
        ("[rollout]\nn = 8", "rollout.n", "grpo.group_size"),
        ("[actor_rollout_ref.rollout]\nn = 8", "actor_rollout_ref.rollout.n", "grpo.group_size"),
        (
            "[actor_rollout_ref.actor]\nstrategy = 'x'",
            "actor_rollout_ref",
            "[grpo], [optimizer]",
        ),
        ("[trainer]\ntotal_epochs = 2", "trainer.total_epochs", "training.steps"),
        ("[trainer]\nproject_name = 'x'", "trainer.project_name", "WANDB_PROJECT"),
        ("[sampling]\ntemperature = 1", "sampling", "[rollout]"),
        ("[grpo]\ntemperature = 1", "grpo.temperature", "There is rollout.temperature"),
        ("[grpo]\nlr = 1e-6", "grpo.lr", "There is optimizer.lr"),
        ("learning_rate = 1e-6", "learning_rate", "optimizer.lr"),
    ],
)
def test_a_name_of_another_project_is_answered(text, key, answer, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config([f"--job.config_file={file}"])
    assert str(error.value).startswith(f"Unknown key {key} in the TOML file.")
    assert answer in str(error.value)


@pytest.mark.parametrize("option", ["--beta=0.1", "--grpo.beta=0.1", "--actor.kl-loss-coef=0.1"])
def test_a_name_of_another_project_is_answered_on_the_command_line(option):
    with pytest.raises(ConfigError, match=r"Unknown argument --.* It is called grpo\.kl_coef here"):
        read_config([option])


def test_an_unknown_name_has_no_answer():
    assert answer_to("grpo.group_sise") == ""
