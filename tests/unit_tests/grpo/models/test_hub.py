# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A model is named as on the Hub, and taken from the cache."""

import json
import os
from pathlib import Path

import pytest
from hub_cache import REVISION, fill_cache

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hub import HubModel, is_hub_name, locate_model
from torchtitan.grpo.start.dry_run import dry_run

REPO = "some-lab/Tiny-0.5M"
SETTING = "model.hf_assets_path"


@pytest.fixture
def snapshot(tmp_path, repository, monkeypatch) -> Path:
    """A model in the cache, which is all that can be had."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return fill_cache(tmp_path / "home", REPO, repository / "assets/reverse_digits/model")


def test_a_name_on_the_hub_is_told_from_a_path():
    assert HubModel.parse(REPO) == HubModel(REPO, None)
    for revision in ("main", "refs/pr/1"):
        assert HubModel.parse(f"{REPO}@{revision}") == HubModel(REPO, revision)
    for path in ("model", "./models/tiny", "/models/tiny", "outputs/task/model", ""):
        assert HubModel.parse(path) is None and not is_hub_name(path)


@pytest.mark.parametrize("name", [REPO, f"{REPO}@main", f"{REPO}@{REVISION}"])
def test_a_model_is_taken_from_the_cache_and_its_revision_is_said(snapshot, name):
    path, notes = locate_model(name, SETTING)
    assert Path(path) == snapshot
    assert notes == [f"{SETTING} = {name}: revision {REVISION} of the Hub, in {snapshot}"]
    assert read_hf_model(path).architecture == "Qwen3ForCausalLM"


def test_a_folder_of_the_same_name_counts_first(snapshot):
    Path(REPO).mkdir(parents=True)
    path, (note,) = locate_model(REPO, SETTING)
    assert path == REPO
    assert f"{REPO}: the folder {Path(REPO).resolve()}, and not the Hub's" in note
    Path("other/model").mkdir(parents=True)
    assert locate_model("other/model", SETTING) == ("other/model", [])


OFFLINE = ["is no folder here", "HF_HUB_OFFLINE is set"]
NO_NAME = ["must be a folder with config.json", "organization/name, got 'none'", "relative to"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nowhere/none", ["'nowhere/none'", "hf download", *OFFLINE]),
        (f"{REPO}@v2", OFFLINE),
        ("none", NO_NAME),
        ("model.gguf", ["folder of a model, but ", " is a file: name the folder"]),
        ("lab/model.safetensors", ["folder of a model, but ", " is a file: name the folder"]),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_what_to_do(snapshot, name, parts):
    Path("lab").mkdir()
    for file in ("model.gguf", "lab/model.safetensors"):
        Path(file).touch()
    with pytest.raises(ConfigError) as error:
        locate_model(name, SETTING)
    for part in [SETTING, *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("present", [None, [], ["model-1.safetensors"], ["model-2.safetensors"]])
def test_weights_that_are_downloaded_in_part_are_no_mistake(
    present, snapshot, repository, monkeypatch
):
    monkeypatch.chdir(repository)
    whole = (snapshot / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").unlink()
    if present is None:
        (snapshot / "model.safetensors").symlink_to("absent")
    else:
        both = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": both}))
    for name in present or ():
        (snapshot / name).write_bytes(whole)
    config = load_config(
        [f"--{SETTING}={snapshot}", "--sft.path=assets/reverse_digits/train.jsonl",
         "--sft.completion_column=answer", "--training.seq_len=64"]
    )  # fmt: skip
    lines = list(dry_run(config, read_hf_model(snapshot), [], {}))
    assert any("weights: not downloaded yet" in line for line in lines)


RANKS = """
import json, os, sys
from pathlib import Path
from torchtitan.grpo.models.hub import once_per_host

def make():
    with open(sys.argv[1], "a") as file:
        file.write(os.environ["LOCAL_RANK"])
    return {"path": "here"}

answers = [once_per_host("a model", make, 60.0)["path"] for _ in range(2)]
Path(sys.argv[2], os.environ["LOCAL_RANK"]).write_text(",".join(answers))
"""


def test_one_rank_of_a_host_asks_the_hub_and_the_others_get_its_answer(fork_server, tmp_path):
    program, calls, answers, console = (
        tmp_path / name for name in ("ranks.py", "calls", "answers", "console.log")
    )
    program.write_text(RANKS)
    answers.mkdir()
    with console.open("w") as output:
        process = fork_server.start(
            program, [str(calls), str(answers)], num_ranks=3, output=output,
            environment=os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0/error.json")},
        )  # fmt: skip
    assert process.wait(120) == 0, console.read_text()
    assert [file.read_text() for file in answers.iterdir()] == ["here,here"] * 3
    assert set(calls.read_text()) == {"0"}
