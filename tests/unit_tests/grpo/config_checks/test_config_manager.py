"""Configurations are merged and checked, mistakes are named, and every shipped file loads."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config_checks import ConfigError, check_model, load_config
from torchtitan.grpo.models.blocks.parts import (
    GatedFeedForward,
    GroupedAttention,
    Layer,
    Layers,
)
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.start.dry_run import describe_plan, describe_settings

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


UNKNOWN = """
learning_rate = 1e-6
trainer = { total_epochs = 3, project_name = "x", foo = 1 }
grpo = { num_generations = 4, beta = 0.1, group_sise = 3, group_size = 4 }
actor_rollout_ref = { rollout = { n = 8 }, actor = { strategy = "fsdp" } }
data.train_files = "x"
gpro = { group_size = 1, clip_low = 3 }
cluster.a = { tagz = ["rollout"], nodes = 3 }
"""
NAMED = """
learning_rate trainer.total_epochs trainer.project_name trainer.foo grpo.num_generations grpo.beta
grpo.group_sise actor_rollout_ref.rollout.n actor_rollout_ref.actor data.train_files gpro
cluster.a.tagz cluster.a.nodes
"""


def test_all_unknown_keys_of_a_file_and_a_command_line_are_told_at_once(load):
    words = [
        "--grpo.bta=3",
        "--grpo.group_size=x",
        "--data.files=1",
        "--cluster.b={tagz = 1, x = 2}",
    ]
    with pytest.raises(ConfigError) as error:
        load(UNKNOWN, *words)
    lines = str(error.value).splitlines()
    file, arguments = lines[: len(NAMED.split())], lines[len(NAMED.split()) :]
    assert [line.split()[2] for line in file] == NAMED.split()
    assert [line.split(". ")[0].split(" must ")[0].split()[-1] for line in arguments[:3]] == [
        "--grpo.bta", "--grpo.group_size", "--data.files",
    ]  # fmt: skip
    assert [line.split()[2] for line in arguments[3:]] == ["tagz", "x"]
    assert all(line.count(". ") for line in lines), "each has its hint"


def test_a_registry_is_a_folder_or_an_address_with_a_key(load, monkeypatch, tmp_path):
    variable = "TORCHTITAN_GRPO_ADMIN_KEY"
    monkeypatch.delenv(variable, raising=False)
    folder = ["--inference.no-launch", "--inference.registry=/shared/registry"]
    assert "that register themselves in /shared/registry" in describe_plan(load(BASE, *folder))
    address = ["--inference.no-launch", "--inference.registry_address=10.0.0.1:29500"]
    with pytest.raises(ConfigError, match=rf"registry_address needs a key.*set {variable}"):
        load(BASE, *address)
    monkeypatch.setenv(variable, "a-key")
    assert "/registry" in describe_plan(load(BASE, *address))
    (file := tmp_path / "servers.txt").write_text("# two\nhttp://a:1\nhttp://b:2/\n")
    from_file = ["--inference.no-launch", f"--inference.urls_file={file}"]
    assert "embedded at http://a:1, http://b:2 (" in describe_plan(load(BASE, *from_file))


def model_of(**facts: Any) -> Any:
    layer = Layer(GroupedAttention(64, 8, 8, head_dim=36), GatedFeedForward(64, 64))
    args = DecoderArgs(layers=Layers.of([layer]))
    given = {"path": Path("model"), "max_position_embeddings": 0, "window": None, **facts}
    return SimpleNamespace(model_args=args, **given)


def test_varlen_attention_is_refused_where_a_gpu_or_a_model_does_not_take_it(load, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    chosen = (BASE, "--grpo.packed_attention=varlen")
    config = load(*chosen)
    with pytest.raises(ConfigError, match=r"mixed_precision_param = 'bfloat16', got 'float32'"):
        load(*chosen, "--training.mixed_precision_param=float32")
    with pytest.raises(
        ConfigError, match=r"'varlen' needs attention heads .* have 36\. Use 'auto'"
    ):
        check_model(config, model_of())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(ConfigError, match=r"capability 8\.0 or more, and this one has 7\.5"):
        load(*chosen)


def test_sequences_longer_than_the_model_was_made_for_are_refused(load):
    model = model_of(max_position_embeddings=1024)
    check_model(load(BASE, "--training.seq_len=1024"), model)
    with pytest.raises(ConfigError, match=r"at most 1024 tokens .*got 2048\. Lower training"):
        check_model(load(BASE), model)
    # Short sequences in longer rows.
    short = ["--prompts.max_prompt_tokens=512", "--inference.max_model_len=1024"]
    check_model(load(BASE, *short), model)


KEYS = '[inference]\napi_key = "secret-a"\nadmin_key = "secret-b"'


@pytest.mark.parametrize(
    "argument", ["--inference.admin-key=secret", '--inference={api_key = "secret"}']
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
    assert "# admin_key is set; its value is not kept" in describe_settings(config)


def test_every_shipped_configuration_loads_and_says_its_use(repository, monkeypatch, tmp_path):
    files = sorted((repository / "train_configs").glob("*.toml"))
    assert files
    # Interpreters of server environments, data sets and keys are not there on every machine.
    monkeypatch.setenv("TORCHTITAN_GRPO_ADMIN_KEY", "secret")
    monkeypatch.setattr("os.access", lambda path, mode: True)
    for file in files:
        head = file.read_text().split("[", 1)[0]
        for word in ("Purpose:", "Hardware:", "Expected:"):
            assert word in head, f"{file.name} must open with {word}"
        ranks = re.search(r"--nproc_per_node=(\d+)", head)
        monkeypatch.setenv("WORLD_SIZE", ranks[1] if ranks else "2")
        arguments = [f"--job.config_file={file}"]
        if "[environments." not in file.read_text():
            arguments.append(f"--prompts.path={tmp_path}")
        if "[sft]" in file.read_text():
            arguments += [f"--sft.path={file}", f"--sft.held_out_path={file}"]
        load_config(arguments)
