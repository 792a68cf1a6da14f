# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of other projects are answered with what the setting is called here."""

import re
import typing

import pytest

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.command_line.keys import (
    all_keys,
    answer_to,
    answer_to_value,
    other_names,
    settings,
)
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
    """Returns the words that a setting takes."""
    if key == "grpo.policy_loss":
        return set(BUILTIN)
    table, name = key.split(".")
    hint = typing.get_type_hints(typing.get_type_hints(JobConfig)[table], include_extras=False)[
        name
    ]
    return {word for part in (hint, *typing.get_args(hint)) for word in typing.get_args(part)} | {
        word for word in typing.get_args(hint) if isinstance(word, str)
    }


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


@pytest.mark.parametrize("word", ["sapo", "gmpo", "gspo", "cispo", "max_rl", "leave_one_out"])
def test_every_loss_and_advantage_is_among_the_answers(word):
    answers = answer_to("actor.policy_loss.loss_mode"), answer_to("algorithm.adv_estimator")
    assert f'"{word}"' in " ".join(answers)


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--grpo.policy_loss=dr_grpo", 'grpo.advantage = "group_mean"'),
        ("--grpo.policy_loss=DAPO", "grpo.clip_high = 0.28"),
        ("--grpo.policy_loss=maxrl", 'grpo.advantage = "max_rl"'),
        ("--grpo.policy_loss=vanilla", 'It is called "clip" here.'),
        ("--grpo.policy_loss=geo_mean", 'It is called "gmpo" here.'),
        ("--grpo.advantage=maxrl", 'It is called "max_rl" here.'),
        ("--grpo.advantage=gae", "There is no critic"),
        ("--grpo.aggregation=seq-mean-token-sum-norm", 'It is called "constant_length" here.'),
        ("--grpo.kl_estimator=low_var_kl", 'It is called "k3" here.'),
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
        ("[grpo]\nloss_type = 'sapo'", "grpo.loss_type", '"sapo"'),
        ("[algorithm]\nadv_estimator = 'maxrl'", "algorithm.adv_estimator", '"max_rl"'),
        ("[actor]\ntau_neg = 1", "actor.tau_neg", "grpo.sapo_temperature_negative"),
        (
            "[vllm]\ngpu_memory_utilization = 0.5",
            "vllm",
            "[inference]",
        ),
        (
            "[grpo]\nvllm_gpu_memory_utilization = 0.5",
            "grpo.vllm_gpu_memory_utilization",
            "inference.gpu_memory_utilization",
        ),
        (
            "[rollout]\ntensor_model_parallel_size = 2",
            "rollout.tensor_model_parallel_size",
            "inference.tensor_parallel_size",
        ),
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
