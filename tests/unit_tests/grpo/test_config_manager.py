"""Configurations are merged and checked, mistakes are named, and every shipped file loads."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config_checks import ConfigError, check_model
from torchtitan.grpo.config_checks.description import describe_plan, describe_settings
from torchtitan.grpo.config_manager import is_dry_run, load_config

BASE = """
[model]
hf_assets_path = "model"
[prompts]
path = "prompts.jsonl"
[reward]
functions = ["exact_match"]
[inference]
launch = true
"""


@pytest.fixture
def load(tmp_path):
    def load(toml, *arguments):
        file = tmp_path / "config.toml"
        file.write_text(toml)
        return load_config(["--job.config_file", str(file), *arguments])

    return load


def test_command_line_wins_over_toml_wins_over_defaults(load):
    config = load(BASE + "[grpo]\ngroup_size = 4\nclip_high = 0.28\n", "--grpo.group_size", "6")
    assert (config.grpo.group_size, config.grpo.clip_high, config.grpo.clip_low) == (6, 0.28, 0.2)
    assert config.training.max_norm == 1.0


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[grpo]\ngroup_sise = 4", r"Unknown key grpo\.group_sise.*Did you mean grpo\.group_size"),
        ("[gpro]\ngroup_size = 4", r"Unknown key gpro.*Did you mean grpo"),
        ("[grpo]\nurls = []", r"Unknown key grpo\.urls.*There is .*inference\.urls"),
        ("[grpo]\ngroup_size = '4'", r"Expected `int`, got `str` - at grpo\.group_size"),
        ("[inference]\ndtype = 'f8'", r"Invalid enum value 'f8' - at inference\.dtype"),
        ("[grpo", "not valid TOML"),
    ],
)
def test_what_the_file_gets_wrong_is_named_with_its_key(load, toml, message):
    with pytest.raises(ConfigError, match=message):
        load(toml)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grpo.group_size=0"],
            r"group_size must be at least 1, got 0\. What it sets: Number of rollouts",
        ),
        (["--grpo.group_size=1"], r"grpo\.group_size must be at least 2 .*grpo\.advantage"),
        (["--grpo.clip_low=1"], r"grpo\.clip_low must be at least 0 and below 1, got 1"),
        (["--rollout.temperature=0"], r"rollout\.temperature must be above 0"),
        (["--rollout.max_concurrent_rollouts=7"], r"at least grpo\.group_size \(8\).*got 7"),
        (["--rollout.max_new_tokens=4096"], r"training\.seq_len \(2048\)"),
        (
            ["--inference.urls=http://a:1"],
            r"exactly one of inference\.launch = true, .*got inference\.launch = true and inference\.urls\.",
        ),
        (["--inference.no-launch"], r"exactly one of .*got none of them"),
        (["--inference.no-launch", "--inference.urls=localhost"], r"http://host:port"),
        (["--inference.kind=tgi"], r"inference\.kind must be one of embedded, .*, got 'tgi'"),
        (["--inference.kind=vllm"], r"needs inference\.python.*install_vllm\.sh"),
        (["--inference.no-launch", "--inference.urls=http://a:1,http://a:1/"], "each server once"),
        (["--inference.python=/no/python"], r"inference\.python must be an executable"),
        (["--reward.weights", "1", "2"], r"reward\.weights must have one entry .* got 2"),
        (["--weight_sync.num_slots=1"], r"weight_sync\.num_slots must be at least 2"),
        (
            ["--parallelism.tensor_parallel_degree=2"],
            r"ranks, 1, .*parallelism\.tensor_parallel_degree \(2\)",
        ),
        (["--parallelism.data_parallel_shard_degree=3"], r"must be the number of ranks, 1"),
        (["--training.global_batch_size=8"], r"global_batch_size must be left at -1"),
        (["--model.flavor=8B"], r"model\.hf_assets_path.*Remove them"),
        (["--prompts.path="], r"prompts\.path must name"),
        (["--validation.enable"], r"validation\.enable .* got True: .*\[evaluation\]"),
        (["--checkpoint.create_seed_checkpoint"], r"create_seed_checkpoint .*hf_assets_path"),
        (["--training.enable_cpu_offload"], r"training\.enable_cpu_offload must be left"),
        (["--memory_estimation.enable"], r"memory_estimation\.enable must be left"),
        (["--fault_tolerance.enable"], r"fault_tolerance\.enable must be left"),
        (["--model.converters=float8"], r"model\.converters .*got \['float8'\]: .*do not round"),
        (["--rollout.top_k=0"], r"rollout\.top_k must be at least 1, or -1 \(all tokens\), got 0"),
        (
            ["--prompts.max_prompt_tokens=-1"],
            r"max_prompt_tokens must be at least 1, or 0 \(training\.seq_len minus .*got -1",
        ),
        (["--inference.max_model_len=2047"], r"inference\.max_model_len .* at least 2048.*2047"),
        (
            ["--prompts.max_prompt_tokens=100", "--inference.max_model_len=300"],
            r"inference\.max_model_len .* at least 356.*got 300",
        ),
        (["--grpo.kl_coef=0.1", "--grpo.ref_model_path=/no"], r"grpo\.ref_model_path .*got /no"),
    ],
)
def test_contradictions_are_refused_with_the_keys_and_the_remedy(load, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grpo.entropy_coef=-1"], r"grpo\.entropy_coef must be at least 0, got -1"),
        (["--grpo.advantage_length_power=-1"], r"advantage_length_power must be at least 0"),
        (["--grpo.reward_positive_scale=-1"], r"reward_positive_scale must be at least 0"),
        (["--grpo.reward_negative_scale=nan"], r"reward_negative_scale must be at least 0"),
        (["--grpo.overlong_penalty=-1"], r"overlong_penalty must be at least 0"),
        (["--grpo.overlong_buffer=257"], r"overlong_buffer .*max_new_tokens \(256\), got 257"),
        (
            ["--grpo.aggregation_length=-1"],
            r"aggregation_length must be at least 1, or 0 \(rollout\.max_new_tokens\)",
        ),
        (["--grpo.aggregation_length=9"], r"aggregation_length .*'constant_length' .*token_mean"),
        (["--grpo.logprob_chunk_tokens=0"], r"logprob_chunk_tokens must be at least 1"),
        (["--grpo.ref_model_ema=1"], r"ref_model_ema must be at least 0 and below 1, got 1"),
        (
            ["--grpo.mismatch_veto=1"],
            r"mismatch_veto must be above 0 and below 1, or 0 \(off\), got 1",
        ),
        (["--grpo.importance_floor=2"], r"importance_floor .*importance_cap \(2\.0\), got 2"),
        (["--grpo.importance_floor=-1"], r"importance_floor must be at least 0"),
        (["--grpo.dual_clip=1"], r"dual_clip must be above 1, or 0 \(off\), got 1"),
        (["--grpo.dual_clip=3", "--grpo.policy_loss=cispo"], r"dual_clip .*got 'cispo' with"),
        (["--grpo.cispo_two_sided"], r"cispo_two_sided is read with .*'cispo' only, got 'clip'"),
        (
            ["--grpo.group_size=1", "--grpo.advantage=batch_norm", "--grpo.filter_zero_advantage"],
            r"filter_zero_advantage leaves out every group of one",
        ),
        (
            ["--grpo.old_policy=sampling", "--grpo.mismatch_correction=mask"],
            r"mismatch_correction = 'mask' needs grpo\.old_policy = 'step_start'",
        ),
        (
            ["--grpo.old_policy=sampling", "--grpo.mismatch_veto=1e-4"],
            r"mismatch_veto needs grpo\.old_policy = 'step_start', got 0\.0001",
        ),
        (
            ["--grpo.old_policy=sampling", "--grpo.mismatch_level=sequence"],
            r"mismatch_level needs grpo\.old_policy = 'step_start'",
        ),
        (
            ["--grpo.mismatch_max_ratio=1"],
            r"mismatch_max_ratio must be above 1, or 0 \(off\), got 1",
        ),
        (["--grpo.mismatch_max_k3=-1"], r"mismatch_max_k3 must be above 0, or 0 \(off\), got -1"),
        (
            ["--grpo.mismatch_normalize", "--grpo.mismatch_correction=none"],
            r"mismatch_normalize needs grpo\.mismatch_correction = 'truncate' or 'mask'",
        ),
        (
            ["--grpo.mismatch_normalize", "--grpo.old_policy=sampling"],
            r"mismatch_normalize needs grpo\.old_policy = 'step_start'",
        ),
        (
            ["--grpo.mismatch_normalize", "--rollout.stream"],
            r"rollout\.stream and grpo\.mismatch_normalize = true cannot be combined",
        ),
        (
            ["--optimizer.muon_momentum=0.9"],
            r"optimizer\.muon_momentum needs optimizer\.name = 'Muon', got 0\.9",
        ),
        (
            ["--optimizer.name=Muon", "--optimizer.muon_adjust_lr=original"],
            r"optimizer\.muon_lr must be set with optimizer\.muon_adjust_lr = 'original'",
        ),
        (
            ["--optimizer.name=Muon", "--optimizer.early_step_in_backward"],
            r"early_step_in_backward cannot be combined with optimizer\.name = 'Muon'",
        ),
        (
            ["--grpo.filter_zero_advantage", "--grpo.kl_coef=0.1", "--grpo.kl_in=reward"],
            r"filter_zero_advantage .*grpo\.kl_coef above 0 \(0\.1\) and grpo\.kl_in = 'reward'",
        ),
        (
            ["--grpo.policy_loss=clop"],
            r"grpo\.policy_loss 'clop' must be .*cispo, clip, gmpo, gspo",
        ),
        (["--grpo.policy_loss=no_such:f"], r"grpo\.policy_loss 'no_such:f': importing no_such"),
    ],
)
def test_loss_settings_out_of_range_or_without_effect_are_refused(load, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inference.max_restarts=-1"], r"inference\.max_restarts must be at least 0, got -1"),
        (["--inference.max_restart_seconds=2"], r"restart_seconds \(5\), .*got 2"),
        (["--inference.restart_seconds=0"], r"inference\.restart_seconds must be above 0"),
        (["--weight_sync.push_timeout_seconds=0"], r"push_timeout_seconds must be above 0"),
        (["--weight_sync.retry_seconds=0"], r"weight_sync\.retry_seconds must be above 0"),
        (["--weight_sync.max_retry_seconds=0.5"], r"retry_seconds \(1\), .*got 0\.5"),
        (["--weight_sync.max_versions=1"], r"max_versions must be at least 2, or 0 .*got 1"),
        (["--weight_sync.max_versions=-1"], r"max_versions must be at least 2, or 0 .*got -1"),
        (
            ["--weight_sync.attest_every=-1"],
            r"attest_every must be at least 1, or 0 \(never\), got -1",
        ),
        (
            ["--weight_sync.attest_tolerance=-0.1"],
            r"attest_tolerance must be above 0, or 0 .*-0\.1",
        ),
        (
            ["--weight_sync.attest_tolerance=nan"],
            r"attest_tolerance must be above 0, or 0 .*got nan",
        ),
        (
            ["--weight_sync.attest_every=0", "--weight_sync.attest_tolerance=0.1"],
            r"attest_tolerance needs weight_sync\.attest_every above 0, got 0\.1",
        ),
        (
            ["--inference.tensor_parallel_size=2"],
            r"inference\.tensor_parallel_size needs inference\.launch = true and",
        ),
        (["--weight_sync.transport=disk"], r"transport = 'disk' needs weight_sync\.disk_path"),
        (["--weight_sync.disk_path=/shared"], r"disk_path needs weight_sync\.transport = 'disk'"),
        (
            ["--weight_sync.transport=disk", f"--weight_sync.disk_path={__file__}"],
            r"disk_path must be a directory, got the file .*test_config_manager",
        ),
        (
            [
                *("--weight_sync.transport=disk", "--weight_sync.disk_path=/shared"),
                "--weight_sync.delta",
            ],
            r"weight_sync\.delta needs weight_sync\.transport = 'auto', 'nccl' or 'host', got True",
        ),
        (
            [
                *("--weight_sync.transport=disk", "--weight_sync.disk_path=/shared"),
                "--weight_sync.master_address=10.0.0.1",
            ],
            r"weight_sync\.master_address needs weight_sync\.transport = 'auto', 'nccl' or 'host'",
        ),
        (
            ["--weight_sync.transport=nccl", "--inference.device=cpu"],
            r"transport = 'nccl' needs servers on GPUs, got inference\.device = 'cpu'",
        ),
        (["--weight_sync.transport=group"], r'got \'group\'. Groups are "auto"'),
    ],
)
def test_weight_sync_settings_that_cannot_hold_are_refused(load, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE, *arguments)


@pytest.mark.parametrize("key", ["delta", "checksum"])
def test_what_sglang_cannot_do_is_not_silently_left_out(load, key):
    sglang = ["--inference.no-launch", "--inference.urls=http://a:1", "--inference.kind=sglang"]
    with pytest.raises(ConfigError, match=rf"weight_sync\.{key} needs inference\.kind .*vllm"):
        load(BASE, *sglang, f"--weight_sync.{key}")


def test_a_registry_is_a_folder_or_an_address_with_a_key(load, monkeypatch):
    variable = "TORCHTITAN_GRPO_ADMIN_KEY"
    monkeypatch.delenv(variable, raising=False)
    folder = ["--inference.no-launch", "--inference.registry=/shared/registry"]
    assert "that register themselves in /shared/registry" in describe_plan(load(BASE, *folder))
    with pytest.raises(ConfigError, match=r"got inference\.urls and inference\.registry"):
        load(BASE, *folder, "--inference.urls=http://a:1")
    address = ["--inference.no-launch", "--inference.registry_address=10.0.0.1:29500"]
    with pytest.raises(ConfigError, match=rf"registry_address needs a key.*set {variable}"):
        load(BASE, *address)
    monkeypatch.setenv(variable, "a-key")
    assert "/registry" in describe_plan(load(BASE, *address))
    for wrong in ("0.0.0.0:29500", "10.0.0.1", ":29500"):
        with pytest.raises(ConfigError, match=r"registry_address must be host:port"):
            load(BASE, "--inference.no-launch", f"--inference.registry_address={wrong}")


def test_servers_on_loopback_are_refused_in_a_run_on_several_nodes(load, monkeypatch):
    urls = ["--inference.no-launch", "--inference.urls=http://127.0.0.1:8000"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load(BASE, *urls)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="addresses that all nodes of a run on several nodes"):
        load(BASE, *urls)
    load(BASE, "--inference.no-launch", "--inference.urls=http://10.0.0.1:8000")


def test_servers_are_named_in_one_place_alone(load, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("# two\nhttp://a:1\nhttp://b:2/\n")
    from_file = ["--inference.no-launch", f"--inference.urls_file={file}"]
    assert "embedded at http://a:1, http://b:2 (" in describe_plan(load(BASE, *from_file))
    with pytest.raises(ConfigError, match=r"got inference\.urls and inference\.urls_file"):
        load(BASE, *from_file, "--inference.urls=http://a:1")
    with pytest.raises(ConfigError, match=r"got inference\.launch = true and inference\.urls_file"):
        load(BASE, *from_file[1:])
    file.write_text("http://a\n")
    with pytest.raises(
        ConfigError, match=r"inference\.urls_file \(.*http://host:port, got 'http://a'"
    ):
        load(BASE, *from_file)
    file.unlink()
    with pytest.raises(ConfigError, match=r"inference\.urls_file must be a file"):
        load(BASE, *from_file)


def test_the_file_of_servers_is_needed_on_the_machine_of_rank_zero_alone(load, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")
    load(BASE, "--inference.no-launch", "--inference.urls_file=/not/here.txt")


@pytest.mark.parametrize(
    ("setting", "needs"),
    [
        ("ref_model_path=model", "grpo.kl_coef above 0"),
        ("ref_model_ema=0.5", "grpo.kl_coef above 0"),
        ("ref_model_offload", "grpo.kl_coef above 0"),
        ("kl_in=reward", "grpo.kl_coef above 0"),
        ("kl_estimator=k1", "grpo.kl_coef above 0"),
        ("advantage=group_mean advantage_std=population", "grpo.advantage = 'group_norm'"),
        ("advantage=leave_one_out advantage_eps=1e-6", "grpo.advantage = 'group_norm'"),
        ("overlong_penalty=0.5", "grpo.overlong_buffer above 0"),
        ("mismatch_correction=none importance_floor=0.5", "grpo.mismatch_correction = 'truncate'"),
        ("mismatch_correction=none importance_cap=3", "grpo.mismatch_correction = 'truncate'"),
        ("old_policy=sampling importance_cap=3", "grpo.old_policy = 'step_start'"),
        ("ptx_coef=0.5", "grpo.ptx_path"),
        ("ptx_per_step=4", "grpo.ptx_path"),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(load, setting, needs):
    arguments = [f"--grpo.{part}" for part in setting.split()]
    key = setting.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(f"grpo.{key} needs {needs}")):
        load(BASE, *arguments)


def test_a_setting_at_its_default_is_not_refused(load):
    load(BASE, "--grpo.kl_estimator=k3", "--grpo.importance_cap=2", "--grpo.ptx_per_step=8")


def test_a_group_of_one_is_compared_to_the_batch(load):
    config = load(BASE, "--grpo.group_size=1", "--grpo.advantage=batch_norm")
    assert config.grpo.group_size == 1


def test_a_loss_of_ones_own_is_tried_before_anything_starts(load, tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(
        "def good(inputs, config):\n    return -inputs.advantages * inputs.logprobs\n"
        "def summed(inputs, config):\n    return good(inputs, config).sum()\n"
    )
    assert load(BASE, f"--grpo.policy_loss={file}:good").grpo.policy_loss.endswith(":good")
    with pytest.raises(ConfigError, match=r"grpo\.policy_loss .*one loss a token, got \[\]"):
        load(BASE, f"--grpo.policy_loss={file}:summed")


def test_flex_attention_is_refused_where_there_is_no_gpu(load, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"grpo\.packed_attention = 'flex' needs a CUDA GPU"):
        load(BASE, "--grpo.packed_attention=flex")
    with pytest.raises(ConfigError, match=r"grpo\.packed_attention = 'varlen' needs a CUDA GPU"):
        load(BASE, "--grpo.packed_attention=varlen")


def test_varlen_attention_is_refused_where_a_gpu_or_a_model_does_not_take_it(load, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    chosen = (BASE, "--grpo.packed_attention=varlen")
    config = load(*chosen)
    with pytest.raises(ConfigError, match=r"mixed_precision_param = 'bfloat16', got 'float32'"):
        load(*chosen, "--training.mixed_precision_param=float32")
    odd: Any = SimpleNamespace(
        path=Path("odd"),
        max_position_embeddings=0,
        window=None,
        model_args=SimpleNamespace(head_dim=36),
    )
    with pytest.raises(
        ConfigError, match=r"'varlen' needs attention heads .* have 36\. Use 'auto'"
    ):
        check_model(config, odd)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(
        ConfigError, match=r"compute capability 8\.0 or more, and this one has 7\.5"
    ):
        load(*chosen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grpo.group_sise", "4"],
            r"argument --grpo\.group_sise\. Did you mean --grpo\.group_size",
        ),
        (["--grpo.group-sise=4"], r"--grpo\.group-sise\. Did you mean --grpo\.group_size"),
        (["--gpro.group_size=4"], r"--gpro\.group_size\. There is grpo\.group_size"),
        (["--inference.no-lunch"], r"--inference\.no-lunch\. Did you mean --inference\.launch"),
        (
            ["--no-grpo.async_weight_update"],
            r"--no-grpo\.async_weight_update\. Did you mean --grpo\.no-async_weight_update\?",
        ),
        (["--group_size", "4"], r"--group_size\. There is grpo\.group_size"),
        (["--grpo.group_size=four"], r"--grpo\.group_size must be an integer, got 'four'\. Change"),
        (["stray"], r"Unexpected argument 'stray' after --job\.config_file .*Change it on the"),
    ],
)
def test_what_the_command_line_gets_wrong_is_said_in_one_line(load, capsys, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(BASE, *arguments)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_tables_lists_and_none_are_given_on_the_command_line(load):
    config = load(
        BASE + "[debug]\nseed = 3\n",
        *("--prompts.rename", '{question = "prompt"}', "--prompts.rename.gold=answer"),
        *("--rollout.environment_options", '{"calls": 2}', "--rollout.environment=calculator"),
        *("--debug.seed", "none", "--rollout.stop_token_ids", "1,2", "--rollout.top_k", "-1"),
        *("--inference.launch=false", "--inference.urls=http://a:1,http://b:2"),
        *("--parallelism.module_fqns_per_model_part", "[]"),
    )
    assert config.prompts.rename == {"question": "prompt", "gold": "answer"}
    assert config.rollout.environment_options == {"calls": 2}
    assert config.debug.seed is None
    assert config.rollout.stop_token_ids == [1, 2]
    assert config.inference.urls == ["http://a:1", "http://b:2"]
    assert config.parallelism.module_fqns_per_model_part == []


def test_both_spellings_of_an_argument_are_known(load):
    urls = "--inference.urls=http://a:1"
    for arguments in (
        ["--inference.no-launch", "--rollout.max-new-tokens=9"],
        ["--inference.no_launch", "--rollout.max_new_tokens", "9"],
    ):
        config = load(BASE, urls, *arguments)
        assert (config.inference.launch, config.rollout.max_new_tokens) == (False, 9)


def test_sequences_longer_than_the_model_was_made_for_are_refused(load):
    args = SimpleNamespace(n_heads=8, hidden_dim=64)
    model = SimpleNamespace(
        max_position_embeddings=1024, path=Path("model"), model_args=args, window=None
    )
    check_model(load(BASE, "--training.seq_len=1024"), model)
    with pytest.raises(ConfigError, match=r"at most 1024 tokens .*got 2048\. Lower training"):
        check_model(load(BASE), model)
    # Short sequences in longer rows.
    short = ["--prompts.max_prompt_tokens=512", "--inference.max_model_len=1024"]
    check_model(load(BASE, *short), model)


KEYS = '[inference]\napi_key = "secret-a"\nadmin_key = "secret-b"'


@pytest.mark.parametrize(
    "argument",
    [
        "--inference.api_key=secret",
        "--inference.admin-key=secret",
        '--inference={api_key = "secret"}',
    ],
)
def test_keys_on_the_command_line_are_refused(load, argument):
    with pytest.raises(
        ConfigError, match=r"must not stand on the command line.*chmod 600"
    ) as caught:
        load(BASE, argument)
    assert "secret" not in str(caught.value)
    assert "environment variable TORCHTITAN_GRPO_A" in str(caught.value)


def test_keys_are_not_shown(load):
    config = load(BASE.replace("[inference]", KEYS))
    assert config.inference.api_key == "secret-a"
    assert "secret" not in describe_settings(config)
    assert "admin_key = '***'" in describe_settings(config)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"must name a file that exists, got /no/such\.toml"):
        load_config(["--job.config_file=/no/such.toml"])


def test_dry_run_describes_the_resolved_configuration_and_the_layout(load):
    arguments = ["--dry-run", "--x"]
    assert is_dry_run(arguments)
    assert arguments == ["--x"]
    config = load(BASE, "--grpo.prompts_per_step=3")
    assert "prompts_per_step = 3" in describe_settings(config)
    assert "3 prompts x 8 rollouts = 24" in describe_plan(config)


def test_every_shipped_configuration_loads_and_says_what_it_is_for(
    repository, monkeypatch, tmp_path
):
    files = sorted((repository / "train_configs").glob("*.toml"))
    assert files
    # Interpreters of server environments, and data sets, are not there on every machine.
    monkeypatch.setattr("os.access", lambda path, mode: True)
    for file in files:
        head = file.read_text().split("[", 1)[0]
        for word in ("Purpose:", "Hardware:", "Expected:"):
            assert word in head, f"{file.name} must open with {word}"
        ranks = re.search(r"--nproc_per_node=(\d+)", head)
        monkeypatch.setenv("WORLD_SIZE", ranks[1] if ranks else "2")
        arguments = [f"--job.config_file={file}", f"--prompts.path={tmp_path}"]
        if "[sft]" in file.read_text():
            arguments += [f"--sft.path={file}", f"--sft.held_out_path={file}"]
        load_config(arguments)
