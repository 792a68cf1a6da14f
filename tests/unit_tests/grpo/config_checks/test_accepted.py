# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Configurations that pass the checks, and those whose refusal depends on more than settings."""

import pytest
import torch

from torchtitan.grpo import cli
from torchtitan.grpo.config.evaluation import evaluation_sets, longest_answer
from torchtitan.grpo.config_checks import ConfigError, check_model
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.dry_run import describe_plan
from torchtitan.grpo.models.hf_config import read_hf_model

TAUGHT = "--reward.functions= --teacher.urls=http://127.0.0.1:9000"
TWO_SERVERS = "--inference.no-launch --inference.urls=http://127.0.0.1:1,http://127.0.0.1:2"


@pytest.mark.parametrize(
    "arguments",
    [
        "--prompts.max_prompt_tokens=100 --rollout.max_new_tokens=256 --inference.max_model_len=356",
        "--evaluation.path=heldout.jsonl --rollout.replay={file}",
        "--sft.path={file}",
        "--rollout.hedge_seconds=5 --inference.num_servers=2",
        f"--rollout.hedge_seconds=5 {TWO_SERVERS}",
        "--rollout.longest_first",
        "--reward.functions=environment --rollout.environment=calculator --rollout.max_turns=3",
        "--rollout.environment=package.module.Game",
        "--rollout.environment=a/b.py:Game",
        "--rollout.dynamic_sampling --rollout.dynamic_sampling_limit=2 --rollout.overdue=drop "
        "--rollout.drop_truncated --rollout.should_accept=mine.py:keep",
        "--rollout.stream --rollout.stream_parts=2",
        "--guards.nonfinite=stop --guards.grad_norm_limit=50",
        "--prompts.path= --prompts.paths={file},owner/two --prompts.weights 0.7 0.3",
        "--prompts.path= --prompts.paths={folder},owner/two",  # may be named like a file
        f"{TAUGHT} --grpo.group_size=1",
        f"{TAUGHT} --teacher.top_k=8 --grpo.off_policy_mask_threshold=0.5",
        "--rollout.replay={file} --teacher.top_k=8 --teacher.coef=0.5",
        "--rollout.deterministic --rollout.max_head_offpolicyness=0",
        "--rollout.environment=calculator --rollout.no-deterministic",
        "--grpo.kl_estimator=k3 --grpo.importance_cap=2 --grpo.ptx_per_step=8",  # the defaults
        "--grpo.group_size=1 --grpo.advantage=batch_norm",
        "--weight_sync.max_versions=2",
        "--profiling.profile_freq=2",  # the profilers are off
    ],
)
def test_settings_that_go_together_are_taken(load, arguments):
    load(arguments)


def test_neither_a_replay_nor_examples_need_prompts_rewards_or_servers(tmp_path):
    file = tmp_path / "file.jsonl"
    file.write_text("{}\n")
    replay = load_config(["--model.hf_assets_path=model", f"--rollout.replay={file}"])
    assert f"servers: none, rollouts are replayed from {file}" in describe_plan(replay)
    supervised = describe_plan(load_config(["--model.hf_assets_path=model", f"--sft.path={file}"]))
    assert "servers: none, the run is trained on the examples of" in supervised
    assert "global batch: 32 examples" in supervised


def test_a_machine_that_does_not_read_a_file_need_not_have_it(load, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")
    load("--rollout.replay=/no/file")


def test_a_hedge_may_wait_for_servers_that_join_later(load, tmp_path):
    (file := tmp_path / "urls").write_text("http://127.0.0.1:1\n")
    load(f"--inference.no-launch --rollout.hedge_seconds=5 --inference.urls_file={file}")
    with pytest.raises(ConfigError, match="needs a second server"):
        load(f"--rollout.hedge_seconds=5 {TWO_SERVERS.partition(',')[0]}")


def test_pinned_checkpoints_need_a_gpu(load, monkeypatch):
    pinned = "--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"checkpoint\.async_mode = \"async\""):
        load(pinned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load(pinned)


def test_a_set_takes_from_the_table_what_it_does_not_set_itself(load):
    config = load(
        "--evaluation.sets.b.max_new_tokens 700",
        "[evaluation]\nnum_prompts = 9\ntemperature = 0.5\n"
        '[evaluation.sets.a]\npath = "a.jsonl"\nfunction = "boxed_math"\n'
        '[evaluation.sets.b]\npath = "b.jsonl"\nnum_samples = 4\npass_at = [1, 4]\n',
    )
    sets = evaluation_sets(config.evaluation)
    assert list(sets) == ["a", "b"]
    assert (sets["a"].function, sets["b"].function) == ("boxed_math", "exact_match")
    assert {settings.num_prompts for settings in sets.values()} == {9}
    assert (sets["a"].num_samples, sets["b"].num_samples) == (1, 4)
    assert longest_answer(config.evaluation, config.rollout.max_new_tokens) == 700


def test_a_path_is_one_set_and_nothing_is_none(load):
    one = load("--evaluation.path=a.jsonl --evaluation.num_prompts=3").evaluation
    ((name, settings),) = evaluation_sets(one).items()
    assert (name, settings.path, settings.num_prompts) == ("heldout", "a.jsonl", 3)
    assert evaluation_sets(load().evaluation) == {}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('template = "{prompt}"\nsystem_prompt = "x"', r"prompts\.template .* both"),
        ("chat_template_kwargs = { tokenize = true }", r"got 'tokenize', which the run sets"),
        *(
            (f'template = "{text}"', r"must contain \{prompt\}")
            for text in ("", "  ", "\\n", "Answer:", "{{prompt}}", "{}")
        ),
    ],
)
def test_chat_settings_that_contradict_are_refused(load, table, message):
    with pytest.raises(ConfigError, match=message):
        load(toml=f"[prompts]\n{table}\n")


@pytest.mark.parametrize("text", ["", " ", "\\n", "\\t  ", "\\u3000"])
def test_a_system_prompt_that_says_nothing_contradicts_no_template(load, text):
    load(toml=f'[prompts]\ntemplate = "{{prompt}}"\nsystem_prompt = "{text}"\n')


def test_a_teacher_s_key_is_masked_and_refused_without_a_teacher(load):
    key = '[teacher]\napi_key = "secret"\n'
    assert load(TAUGHT, key).to_dict()["teacher"]["api_key"] == "***"
    with pytest.raises(ConfigError, match=r"teacher\.api_key needs teacher\.urls") as refused:
        load(toml=key)
    assert "secret" not in str(refused.value)


def test_the_command_for_examples_needs_some(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert cli.run(["sft", "train_configs/quickstart.toml"]) == 2
    assert "torchtitan-grpo sft needs sft.path" in capsys.readouterr().err


SMALL = "--lora.rank=4 --training.seq_len=32 --rollout.max_new_tokens=8"


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("qwen3", "--lora.rank=33", "rank must be at most 32 for k_proj"),
        ("qwen3_mixed", "", "must not name down_proj, gate_proj, up_proj"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(kind, more, message, make_model, load):
    _, folder = make_model(kind, **({"mlp_only_layers": []} if kind == "qwen3_mixed" else {}))
    config = load(f"{SMALL} --model.hf_assets_path={folder} {more}")
    with pytest.raises(ConfigError, match=message):
        check_model(config, read_hf_model(folder))


def test_a_stage_without_adapters_is_refused(make_model, monkeypatch, load):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, folder = make_model("qwen3", num_hidden_layers=2)
    pipeline = (
        "--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=1F1B"
    )
    config = load(f"{SMALL} --model.hf_assets_path={folder} {pipeline}")
    config.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="stage 0 has tok_embeddings alone"):
        check_model(config, read_hf_model(folder))
