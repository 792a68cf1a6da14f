# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of other projects are answered with what the setting is called here."""

import re
import typing

import pytest

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.command_line.keys import all_keys, answer_to_value, other_names, settings
from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.losses.policy_terms import BUILTIN

KEYS = settings(JobConfig)
TABLES = set(all_keys(JobConfig)) - set(KEYS)
NAMES, OTHER_TABLES, VALUES = (other_names()[part] for part in ("names", "tables", "values"))
ANSWERS = {**NAMES, **OTHER_TABLES}


def test_every_answer_names_settings_that_there_are():
    for name, answer in ANSWERS.items():
        for key in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", answer):
            is_setting = key in KEYS or key in ("samples.jsonl", "torchtitan.grpo")
            assert is_setting, f"{name}: {key}"
        for table in re.findall(r"\[([a-z_]+)\]", answer):
            assert table in TABLES, f"{name}: {table}"


def values_of(key: str) -> set[str]:
    if key == "grpo.policy_loss":
        return set(BUILTIN)
    table, name = key.split(".")
    hint = typing.get_type_hints(typing.get_type_hints(JobConfig)[table])[name]
    return {word for part in (hint, *typing.get_args(hint)) for word in typing.get_args(part)}


# Words between quotation marks that are no values of a setting that the answer names before them.
NO_VALUES = {"organization/name@revision", "gloo"}


def test_every_answer_names_values_that_there_are():
    given = ANSWERS | {
        f"{k} = {v}": answer_to_value(k, v) for k, of_key in VALUES.items() for v in of_key
    }
    num_words = 0
    for name, answer in given.items():
        keys = re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", f"{name} {answer}")
        known = {word for key in keys if key in KEYS for word in values_of(key)} | NO_VALUES
        for word in re.findall(r'"([^"]+)"', answer):
            assert word in known, f"{name}: {word}"
            num_words += 1
    assert num_words > 40
    for key, of_key in VALUES.items():
        assert key in KEYS
        assert not set(of_key) & values_of(key), "what is a value needs no answer"


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--grpo.policy_loss=dr_grpo", 'grpo.advantage = "group_mean"'),
        ("--grpo.policy_loss=vanilla", 'It is called "clip" here.'),
        ("--grpo.advantage=maxrl", 'It is called "max_rl" here.'),
        ("--grpo.advantage=vapo", 'It is called "gae" here.'),
        ("--grpo.aggregation=seq-mean-token-sum-norm", 'It is called "constant_length" here.'),
        ("--weight_sync.transport=group", '"nccl" or "host" now'),
    ],
)
def test_a_value_of_another_project_is_answered(option, answer):
    needed = ["--model.hf_assets_path=m", "--prompts.path=p", "--inference.launch"]
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config([*needed, "--reward.functions=exact_match", option])


def test_no_name_hides_a_setting_of_ours():
    # A name that a setting of ours has as well is answered by that setting, unless both may be meant.
    names = {key.rpartition(".")[2] for key in KEYS}
    both = {"delta", "max_concurrent", "model_path", "tensor_parallel_size"}
    assert set(NAMES) & names == both
    assert not set(NAMES) & set(KEYS)
    assert not (set(NAMES) | set(OTHER_TABLES)) & set(TABLES)


OTHER = """
[grpo] beta = 0.1 | grpo.beta | grpo.kl_coef
[optimizer] learning_rate = 1e-6 | optimizer.learning_rate | optimizer.lr
[grpo] epsilon = 0.2 | grpo.epsilon | grpo.clip_low and grpo.clip_high
[grpo] scale_rewards = false | grpo.scale_rewards | group_mean
[model] lora_rank = 8 | model.lora_rank | lora.rank
[peft_config] r = 8 | peft_config | [lora]
[grpo] loss_type = 'sapo' | grpo.loss_type | "sapo"
[algorithm] adv_estimator = 'maxrl' | algorithm.adv_estimator | "max_rl"
[vllm] gpu_memory_utilization = 0.5 | vllm | [inference]
[actor_rollout_ref.rollout] n = 8 | actor_rollout_ref.rollout.n | grpo.group_size
[actor_rollout_ref.actor] strategy = 'x' | actor_rollout_ref | [grpo], [optimizer]
[trainer] project_name = 'x' | trainer.project_name | WANDB_PROJECT
[grpo] temperature = 1 | grpo.temperature | There is rollout.temperature
learning_rate = 1e-6 | learning_rate | optimizer.lr
"""


@pytest.mark.parametrize("row", OTHER.strip().splitlines())
def test_a_name_of_another_project_is_answered(row, tmp_path):
    text, key, answer = row.split(" | ")
    file = tmp_path / "x.toml"
    file.write_text(text.replace("] ", "]\n"))
    with pytest.raises(ConfigError) as error:
        read_config([f"--job.config_file={file}"])
    assert str(error.value).startswith(f"Unknown key {key} in the TOML file.")
    assert answer in str(error.value)


@pytest.mark.parametrize("option", ["--beta=0.1", "--grpo.beta=0.1", "--actor.kl-loss-coef=0.1"])
def test_a_name_of_another_project_is_answered_on_the_command_line(option):
    with pytest.raises(ConfigError, match=r"Unknown argument --.* It is called grpo\.kl_coef here"):
        read_config([option])
