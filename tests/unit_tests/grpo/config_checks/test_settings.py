# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Configurations that pass the checks, those of refused.txt, and those that depend on more than settings."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from torchtitan.grpo.commands import cli
from torchtitan.grpo.config import GRPO, ClusterRow
from torchtitan.grpo.config.environments import (
    environment_weights,
    environments_of,
    reward_functions,
)
from torchtitan.grpo.config.evaluation import evaluation_sets, longest_answer
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import ConfigError, check_model, load_config, warnings_of
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.start.dry_run import describe_plan

TAUGHT = "--reward.functions= --teacher.urls=http://127.0.0.1:9000"
ZERO_BUBBLE = "pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBVZeroBubble"


@pytest.mark.parametrize(
    "arguments",
    [
        "--prompts.max_prompt_tokens=100 --rollout.max_new_tokens=256 --inference.max_model_len=356",
        "--evaluation.path=heldout.jsonl --rollout.replay={file}",
        "--prompts.template={prompt} --prompts.system_prompt=x",  # of chat messages
        "--sft.path={file}",
        "--evaluation.path=a.jsonl --evaluation.function=judge --reward.judge.url=http://a:1 "
        "--reward.judge.kind=score --reward.judge.template={prompt}{completion} "
        "--reward.judge.api_key_variable=MY_KEY --workers.pass_variables=MY_*",
        "--rollout.longest_first",
        "--reward.functions=environment --rollout.environment=calculator --rollout.max_turns=3",
        "--rollout.environment=package.module.Game",
        "--rollout.environment=a/b.py:Game",
        "--rollout.dynamic_sampling --rollout.dynamic_sampling_limit=2 --rollout.overdue=drop "
        "--rollout.drop_truncated --rollout.should_accept=mine.py:keep",
        "--rollout.stream --rollout.stream_parts=2",
        "--grpo.advantage=gae --grpo.group_size=1",
        "--grpo.advantage=gae --critic.no-whiten --rollout.stream --rollout.stream_parts=2",
        "--inference.lend --rollout.max_head_offpolicyness=0 --rollout.deterministic",
        "--inference.lend --grpo.no-async_weight_update --rollout.replay={file}",  # no servers
        "--cluster.a.tags=train,rollout --cluster.b.tags=rollout",
        "--cluster.a.tags= --rollout.replay={file}",
        "--guards.nonfinite=stop --guards.grad_norm_factor=50",
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
        "--observe.monitor_host=::1 --weight_sync.master_address=::1",
        "--rollout.max_concurrent_rollouts=31 --inference.num_servers=2 "
        "--inference.max_batched_tokens=17",
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


def test_a_set_takes_from_the_table_what_it_does_not_set_itself(load):
    one = load("--evaluation.path=a.jsonl --evaluation.num_prompts=3").evaluation
    ((name, settings),) = evaluation_sets(one).items()
    assert (name, settings.path, settings.num_prompts) == ("heldout", "a.jsonl", 3)
    assert evaluation_sets(load().evaluation) == {}
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


def test_an_environment_takes_from_the_run_what_it_does_not_set_itself(load):
    config = load(
        "--prompts.path= --reward.functions=[] --environments.sums.reward.weights 2 "
        "--environments.sums.rollout.environment_options.base 3",
        "[rollout]\nmin_completion_tokens = 2\nmax_turns = 4\n[reward.judge]\nurl = 'http://a:1'\n"
        "model = 'm'\ntemplate = '{completion}'\n"
        "[environments.words]\nprompts = { path = 'words.jsonl', template = '{prompt}?' }\n"
        "reward.functions = ['judge', 'mine.py:score']\n"
        "[environments.sums]\nprompts.path = 'sums.jsonl'\nrollout.environment = 'calculator'\n"
        "rollout.min_completion_tokens = 1\nreward.functions = ['environment']\n",
    )
    owns = environments_of(config)
    assert list(owns) == ["sums", "words"], "their order in the file does not matter"
    sums, words = owns["sums"], owns["words"]
    assert (sums.prompts.path, sums.prompts.template) == ("sums.jsonl", None)
    assert (words.prompts.path, words.prompts.template) == ("words.jsonl", "{prompt}?")
    assert sums.rollout.environment_options == {"base": 3}
    assert (sums.rollout.max_turns, words.rollout.environment) == (4, None)
    assert [own.rollout.min_completion_tokens for own in owns.values()] == [1, 2]
    assert (sums.reward.weights, words.reward.weights) == ([2], [])
    assert sums.grpo is config.grpo and not sums.environments
    assert reward_functions(config) == ["environment", "judge", "mine.py:score"]
    assert environments_of(sums) == {"": sums} and config.has_rewards
    assert environment_weights(config) == [], "each is drawn from in proportion to its prompts"


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


@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        (8, "tensor_parallel_degree=2 expert_parallel_degree=4"),
        (2, f"{ZERO_BUBBLE} --compile.enable --activation_checkpoint.mode=full"),
        (2, f"{ZERO_BUBBLE} --activation_checkpoint.mode=selective"),  # by layers
        (2, "pipeline_parallel_degree=2 pipeline_parallel_schedule=Interleaved1F1B"),
    ],
)
def test_a_layout_that_works_is_taken(load, monkeypatch, num_ranks, arguments):
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    words = arguments.split()
    load(" ".join(w if w.startswith("--") else f"--parallelism.{w}" for w in words))


def test_settings_are_checked_against_the_machine(load, monkeypatch):
    pinned = "--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load(pinned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"checkpoint\.async_mode = \"async\""):
        load(pinned)
    urls = "--inference.no-launch --inference.urls=http://127.0.0.1:8000"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load(urls)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="addresses that all nodes of a run on several nodes"):
        load(urls)
    # Files that rank 0 alone reads are needed on its machine alone.
    monkeypatch.setenv("GROUP_RANK", "1")
    load("--rollout.replay=/no/file")
    load("--inference.no-launch --inference.urls_file=/not/here.txt")
    judge = "--reward.functions=judge --reward.judge.url=http://a:1 --reward.judge.model=m"
    load(f"{judge} --reward.judge.template=/no/template.txt")


def test_devices_are_lent_if_there_are_some_that_servers_share(load, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lend = "--inference.lend --optimizer.offload_while_lent"
    load(f"{lend} --inference.device=cpu")  # nothing is known of the ranks yet
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    load(lend)
    for arguments, message in (
        ("--inference.device=cpu", "got inference.device = 'cpu', with which servers need none"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(f"{lend} {arguments}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="no server is for the GPUs without a rank, here 2, 3"):
        load(lend)
    both, own = "--cluster.a.tags=train,rollout", "--cluster.b.tags=rollout"
    config = load(f"{both} {own} --cluster.b.num_servers=2 --optimizer.offload_while_lent")
    servers = "servers: 1 x embedded on lent devices and 2 x embedded, launched on this machine"
    assert servers in describe_plan(config)
    load(f"{both} --cluster.a.gpus=1 {own} --cluster.b.gpus=3,2")
    for arguments, message in (
        (both, "no server is for the GPUs without a rank, here 2, 3"),
        (f"{both} --cluster.a.gpus=1,2", r"must be GPUs with a training rank, here \[0, 1\]"),
        (
            f"{own} --cluster.b.gpus=1",
            r"must be GPUs without a training rank, here \[2, 3\], got \[1\]",
        ),
        (f"{both} {own} --inference.device=cpu", "with which servers need none"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(arguments)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="alone need others, but each of the 2 GPUs has a rank"):
        load(f"{both} {own}")


def test_a_row_of_the_file_is_read_and_an_unknown_key_in_it_is_refused(load):
    row = "[cluster.big-ones]\ntags = ['rollout']\ngpus = [4, 5]\n"
    assert load(toml=row).cluster == {"big-ones": ClusterRow(["rollout"], 1, [4, 5])}
    with pytest.raises(
        ConfigError, match=r"cluster.big-ones.num_server .* cluster.big-ones.num_servers"
    ):
        load(toml=f"{row}num_server = 2")
    with pytest.raises(ConfigError, match=r"cluster.big-ones.tags must be .* got \['serve'\]"):
        load(toml=row.replace("rollout", "serve"))


def test_adapters_that_do_not_fit_the_model_are_refused(make_model, monkeypatch, load):
    whole = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]

    def refuse(kind: str, more: str, message: str, *, first: int = 1, **sizes: object) -> None:
        _, folder = make_model(kind, **sizes)
        config = load(
            f"--lora.rank=4 --training.seq_len=32 --rollout.max_new_tokens=8 {more} "
            f"--model.hf_assets_path={folder}"
        )
        if "pipeline" in more:
            config.parallelism.module_fqns_per_model_part = [whole[:first], whole[first:]]
        with pytest.raises(ConfigError, match=message):
            check_model(config, read_hf_model(folder))

    refuse("qwen3", "--lora.rank=33", "rank must be at most 32 for k_proj")
    refuse("qwen3", "--lora.target_modules=query", "has q_proj, k_proj, .* got query")
    refuse("qwen3_mixed", "", "got down_proj, .*, up_proj. The experts", mlp_only_layers=[])
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = "--parallelism.pipeline_parallel_degree=2"
    refuse("qwen3", pipeline, "stage 0 has tok_embeddings alone", num_hidden_layers=2)
    of_dense = f"{pipeline} --lora.target_modules=gate_proj"  # the second layer's
    message = "stage 0 has tok_embeddings, layers.0 alone"
    refuse("qwen3_mixed", of_dense, message, first=2, num_hidden_layers=2)


# -- losses of one's own ------------------------------------------------------------------

LOSSES = """
from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.policy_terms import PolicyTerm


def mine(inputs, config, *, weight, floor=0.0, names=()):
    return -(weight + len(names)) * inputs.advantages * inputs.logprobs


def summed(inputs, config):
    return mine(inputs, config, weight=1).sum()


def named_as_another(inputs, config):
    losses = -inputs.advantages * inputs.logprobs
    return PolicyTerm(losses, {"loss/total": TokenMetric(losses, "mean")})
"""


@pytest.fixture
def load_loss(load, tmp_path):
    def made(options: str = "", loss: str = "mine"):
        file = tmp_path / f"loss_{abs(hash(tmp_path))}.py"
        file.write_text(LOSSES)
        named = loss if loss == "clip" else f"{file}:{loss}"
        return load(toml=f'[grpo]\npolicy_loss = "{named}"\n{options}\n').grpo

    return made


def test_options_of_a_loss_come_from_the_file_and_reach_the_rollout_process(load_loss):
    grpo = load_loss('policy_loss_options = { weight = 2.5, names = ["a"] }')
    assert grpo.policy_loss_options == {"weight": 2.5, "names": ["a"]}
    assert msgspec.json.decode(msgspec.json.encode(grpo), type=GRPO) == grpo


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("mine", "policy_loss_options = { wight = 1.0 }", r"no option 'wight'\. .* Did you mean weight\?"),
        ("mine", "", r"grpo\.policy_loss_options must set weight"),
        ("mine", 'policy_loss_options = { weight = "a" }', r"failed on an example with TypeError"),
        ("mine", "policy_loss_options = 3", r"grpo\.policy_loss_options"),
        ("clip", "policy_loss_options = { clip_high = 0.3 }", r"no option 'clip_high'\. It takes none"),
        ("summed", "", r"grpo\.policy_loss .*one loss a token, got \[\]"),
        ("named_as_another", "", r"metric 'loss/total', which is the name of a metric of"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_fit_is_refused_before_the_run(load_loss, loss, options, message):
    with pytest.raises(ConfigError, match=message):
        load_loss(options, loss)


# -- settings that nothing reads ----------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "value"), [("urls", ["http://a:1"]), ("urls_file", "servers.txt")]
)
def test_keys_that_only_launched_servers_read_are_named_without_their_values(source, value):
    config = JobConfig()
    inference = config.inference
    # These concern servers that run already, too.
    inference.startup_timeout_seconds, inference.max_model_len, inference.api_key = 5.0, 64, "x"
    setattr(inference, source, value)
    assert warnings_of(config) == []
    inference.python, inference.dtype, inference.extra_args = "python3", "float32", ["--key=secret"]
    (warning,) = warnings_of(config)
    assert "inference.python, inference.dtype, inference.extra_args, because" in warning
    assert f"the servers of inference.{source} run" in warning
    assert "secret" not in warning
    inference.launch = True
    assert warnings_of(config) == []
    inference.launch, config.rollout.replay = False, "rollouts.bin"
    assert warnings_of(config) == []


@pytest.mark.parametrize(
    ("seq_len", "prompt", "answer", "is_told"),
    [
        (16, 10, 12, True),
        (16, 4, 13, True),
        (16, 15, 2, True),
        (16, 10, 6, False),
        (16, 0, 12, False),
        (9, 20, 8, True),
    ],
)
def test_rows_shorter_than_prompt_and_answer_are_told_with_the_three_settings(
    seq_len, prompt, answer, is_told
):
    config = JobConfig()
    config.inference.launch, config.training.seq_len = True, seq_len
    config.prompts.max_prompt_tokens, config.rollout.max_new_tokens = prompt, answer
    told = warnings_of(config)
    assert len(told) == is_told
    if is_told:
        assert (
            f"prompts.max_prompt_tokens ({prompt}) plus rollout.max_new_tokens ({answer})"
            in told[0]
        )
        assert f"training.seq_len ({seq_len})" in told[0]
    config.sft.path = "examples.jsonl"
    assert warnings_of(config) == []


def _rows() -> Iterator[tuple[str, str, list[str]]]:
    num_ranks = common = ""
    for line in Path(__file__).with_name("refused.txt").read_text().splitlines():
        if heading := re.match(r"\[[^]]*?(?:on (\d+) ranks)?\](.*)", line):
            num_ranks, common = heading[1] or "1", heading[2].strip()
        elif line and not line.startswith("#"):
            arguments, _, message = line.partition("  =>  ")
            yield num_ranks, f"{common} {arguments}".strip(), message.split(" ... ")


ROWS = list(_rows())


@pytest.mark.parametrize(("num_ranks", "arguments", "parts"), ROWS, ids=[row[1] for row in ROWS])
def test_each_row_of_refused_txt_is_refused(load, monkeypatch, num_ranks, arguments, parts):
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    monkeypatch.setenv("TORCHTITAN_GRPO_ADMIN_KEY", "x")
    with pytest.raises(ConfigError) as refused:
        load(arguments)
    lines = str(refused.value).splitlines()  # one for each mistake
    assert any(re.search(".*".join(map(re.escape, parts)), line) for line in lines), lines
