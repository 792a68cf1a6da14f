# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Configurations as a newcomer writes them wrong, given to ``--dry-run``: one message each, with the remedy."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from torchtitan.grpo.start import entry

WEIGHTS = "model.safetensors"
REWARDS = """
def key_error(completions, answer):
    return [1.0 if "x" in {}["no such key"] else 0.0 for _ in completions]

def not_a_list(completions):
    return 1.0

def good(completions, answer):
    return [0.5] * len(completions)
"""


@pytest.fixture
def start(repository: Path, tmp_path: Path, monkeypatch, capsys) -> Callable[..., tuple]:
    """Runs a dry run of the smallest configuration with other tables; returns status, output, errors."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("RANK", raising=False)

    def run(**tables: str) -> tuple[int, str, list[str]]:
        settings = {
            "job": f'dump_folder = "{tmp_path}/out"',
            "model": 'hf_assets_path = "assets/reverse_digits/model"',
            "prompts": 'path = "assets/reverse_digits/train.jsonl"',
            "reward": 'functions = ["exact_match"]',
            "inference": "launch = true",
            "training": "seq_len = 256",
            "rollout": "max_new_tokens = 12",
            **tables,
        }
        file = tmp_path / "x.toml"
        file.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in settings.items()))
        capsys.readouterr()
        status = entry.run(_no_trainer, ["--job.config_file", str(file), "--dry-run"])
        said = capsys.readouterr()
        assert not (tmp_path / "out").exists(), "a check must leave nothing behind"
        return status, said.out, [x for x in said.err.splitlines() if x.startswith("error: ")]

    return run


def _no_trainer(*_):
    raise AssertionError("a dry run must not train")


def name_as_end(folder: Path, token: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))


def _shorten_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), ["*.safetensors", "model.hf_assets_path"]),
        (_shorten_a_tensor, ["model.norm.weight", "must have shape [96]", "belong to the same model"]),
        (lambda folder: name_as_end(folder, 100_000), ["a token id of the model", "100000", "generation_config.json"]),
    ],
)  # fmt: skip
def test_a_wrong_model_is_one_message_with_the_remedy(spoil, parts, start, repository, tmp_path):
    folder = shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / "model")
    spoil(folder)
    _expect(start, {"model": f'hf_assets_path = "{folder}"'}, [str(folder), *parts])


PROMPTS = 'path = "assets/reverse_digits/train.jsonl"'
SETTINGS = {
    "no prompts": ("prompts", 'path = "data/train.jsonl"', ["prompts.path", "data/train.jsonl"]),
    "no such column": (
        "prompts", f'{PROMPTS}\ncolumn = "question"', ["'question'", "['answer', 'prompt']", "prompts.column"],
    ),
    "system prompt for strings": (
        "prompts", f'{PROMPTS}\nsystem_prompt = "Think."', ["prompts.system_prompt needs", "chat messages"],
    ),
    "no reward file": ("reward", 'functions = ["mine.py:score"]', ["mine.py does not exist"]),
    "no such environment": (
        "rollout", 'max_new_tokens = 12\nenvironment = "games.py:Chess"',
        ["rollout.environment", "games.py does not exist"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_one_message_with_the_remedy(name, start):
    table, lines, parts = SETTINGS[name]
    _expect(start, {table: lines}, parts)


def test_a_wrong_reward_is_one_message_with_its_line(start, tmp_path):
    good, broken = tmp_path / "rewards.py", tmp_path / "broken.py"
    good.write_text(REWARDS)
    broken.write_text("def score(completions)\n    return [0.0]\n")
    for function, parts in {
        f"{good}:key_error": ["raised KeyError: 'no such key' (at ", "rewards.py:3, in "],
        f"{good}:not_a_list": ["not_a_list", "must return a list of 1 numbers, got a float"],
        f"{broken}:score": ["SyntaxError", "broken.py, line 1"],
    }.items():
        _expect(start, {"reward": f'functions = ["{function}"]'}, parts)


def test_rows_that_do_not_fit_the_reward_or_the_model_are_one_message(start, tmp_path):
    parquet, chat = tmp_path / "rows.parquet", tmp_path / "chat.jsonl"
    pq.write_table(pa.Table.from_pylist([{"prompt": "1+1=", "solution": "2"}]), parquet)
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    chat.write_text(json.dumps(row) + "\n")
    for file, parts in (
        (parquet, ["exact_match", "needs the argument 'answer'", "['solution']", "prompts.rename"]),
        (chat, ["chat messages", "no chat template", "prompts.template"]),
    ):
        _expect(start, {"prompts": f'path = "{file}"'}, parts)


def test_the_last_row_is_checked_as_the_first_is(start, tmp_path):
    rows, message = tmp_path / "rows.jsonl", "got None"
    fine = [{"prompt": "12->", "answer": "21"}] * 8
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*fine, {"prompt": None}]))
    parts = ["prompts.path: 1 of the 9 rows", f"{rows}:9: ", message]
    _expect(start, {"prompts": f'path = "{rows}"'}, parts)
    held_out = {"evaluation": f'path = "{rows}"\nfunction = "exact_match"'}
    _expect(start, held_out, ["evaluation.path: 1 of the 9 rows", f"{rows}:9: ", message])


def _expect(start: Callable[..., tuple], tables: dict[str, str], parts: list[str]) -> None:
    status, _, errors = start(**tables)
    assert status == 2
    (message,) = errors
    for part in parts:
        assert part in message


def test_a_right_configuration_is_listed_with_all_that_was_opened(start, tmp_path, repository):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    held_out = "assets/reverse_digits/heldout.jsonl"
    status, out, errors = start(
        reward=f'functions = ["{rewards}:good", "partial_match"]\nweights = [1.0, 0.2]',
        evaluation=f'path = "{held_out}"\nnum_prompts = 5',
        rollout='max_new_tokens = 12\nenvironment = "calculator"',
        optimizer="lr = 1e-5",
    )
    assert (status, errors) == (0, [])
    inputs = out[out.index("\nInputs\n") :]
    first = json.loads((repository / "assets/reverse_digits/train.jsonl").open().readline())
    for part in (
        "vocab_size 128",
        "a completion ends at: 1 '<eos>'",
        "train.jsonl, 4096 rows",
        "columns: prompt (the prompt), answer",
        f"string, {len(first['prompt'])} tokens: {first['prompt']!r}",
        "rollout.environment: calculator",
        f"{rewards}:good, weight 1; an empty completion of the first prompt earns 0.5",
        "partial_match, weight 0.2",
        f"{held_out}, 5 prompts used; exact_match gives an empty completion 0",
        "tensors in assets/reverse_digits/model with the names and shapes of the model",
    ):
        assert part in inputs, inputs


def test_what_the_run_would_warn_of_is_shown(start, repository, tmp_path):
    folder = shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / "model")
    name_as_end(folder, 5)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "12->", "answer": ""}) + "\n")
    status, out, _ = start(model=f'hf_assets_path = "{folder}"', prompts=f'path = "{rows}"')
    assert status == 0
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert any("does not end at '<eos>' (1)" in warning for warning in warnings), out
    assert any("exact_match cannot be earned in 1 of the first 1" in w for w in warnings), out


def test_an_input_that_does_not_open_in_time_ends_the_check_and_its_processes(start, tmp_path):
    hangs, pid = tmp_path / "hangs.py", tmp_path / "pid"
    note = f"open({str(pid)!r}, 'w').write(str(os.getpid()))"
    hangs.write_text(f"import os, time\n{note}\ntime.sleep(1000)\n")
    status, _, errors = start(
        reward=f'functions = ["{hangs}:score"]',
        inference="launch = true\nstartup_timeout_seconds = 12",
    )
    assert status == 2
    assert "within 12 s (inference.startup_timeout_seconds)" in errors[0]
    worker = Path("/proc") / pid.read_text()
    deadline = time.monotonic() + 60
    while worker.exists():
        assert time.monotonic() < deadline, "the worker outlives the check"
        time.sleep(0.05)
