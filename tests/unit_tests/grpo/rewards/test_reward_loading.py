# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import os.path
import random
import subprocess
from pathlib import Path

import pytest

from torchtitan.grpo.rewards.builtin import exact_match
from torchtitan.grpo.rewards.reward_loading import (
    call_function,
    foreign_signature,
    load_function,
    missing_arguments,
    short_names,
)
from torchtitan.grpo.system.light_start import LIGHT_PYTHON


def test_a_function_is_found_by_its_name_its_module_or_its_file(tmp_path: Path):
    assert load_function("exact_match") is exact_match
    assert load_function("os.path:join") is load_function("os.path.join") is os.path.join
    file = tmp_path / "mine.py"
    file.write_text("def reward(prompts, completions, **kw):\n    return [0.5] * len(prompts)\n")
    assert load_function(f"{file}:reward")(["a"], ["b"]) == [0.5]
    for source, error in (
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def reward(:\n", "SyntaxError"),
    ):
        broken = tmp_path / "broken.py"
        broken.write_text(source)
        with pytest.raises(ValueError, match=error):
            load_function(f"{broken}:reward")


@pytest.mark.parametrize(
    "shadow", ["random", "logging", "tokenizers", "numpy", "typing", "asyncio"]
)
@pytest.mark.parametrize("path", ["own:reward", "own.py:reward"])
def test_a_function_finds_its_neighbours_and_they_shadow_nothing(tmp_path, shadow, path):
    (tmp_path / f"{shadow}.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "neighbour.py").write_text(f"import {shadow}\nVALUE = {shadow}.__file__\n")
    (tmp_path / "own.py").write_text("import neighbour\ndef reward(): return neighbour.VALUE\n")
    (tmp_path / "program.py").write_text(
        "import sys\nfrom torchtitan.grpo.system.functions import load_function\n"
        "print(load_function(sys.argv[1], 'x', [])())\n"
    )
    command = [*LIGHT_PYTHON, "program", path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact_mach", "built-in agent, boxed_math, environment, exact_match"),
        ("no_such_module:reward", "importing no_such_module failed with ModuleNotFoundError"),
        ("os.path:no_such", r"os.path \(.*/posixpath.py\) has no 'no_such'"),
        ("os.path:sep", "must be callable, got a str"),
        ("missing/file.py:reward", r"the file .*missing/file\.py does not exist"),
        ("os.path:", "must be package.module:function"),
    ],
)
def test_path_that_cannot_be_loaded_is_refused_by_name(path: str, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        load_function(path)
    assert repr(path) in str(caught.value)


def test_a_file_that_an_installed_module_hides_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_function("random:reward")
    assert f"random ({random.__file__}) has no 'reward'" in str(caught.value)
    assert "Did you mean" not in str(caught.value)
    for name in ("random", "sys"):
        (tmp_path / f"{name}.py").write_text("def reward(): ...\n")
        with pytest.raises(ValueError, match=rf"Did you mean \./{name}\.py:reward\?"):
            load_function(f"{name}:reward")
        load_function(f"./{name}.py:reward")


def test_only_accepted_keywords_are_passed():
    def narrow(completions, answer):
        return [completions, answer]

    def wide(completions, **kwargs):
        return sorted(kwargs)

    columns = {"answer": ["x"], "other": [1]}
    assert call_function(narrow, ["p"], ["c"], [[1]], columns, {"log_metric": print}) == [
        ["c"],
        ["x"],
    ]
    wide_names = ["answer", "completion_ids", "log_metric", "other", "prompts"]
    assert call_function(wide, ["p"], ["c"], [[1]], columns, {"log_metric": print}) == wide_names


def test_names_for_metrics_are_short_unless_two_are_equal():
    assert short_names(["exact_match", "a.b:f"]) == ["exact_match", "f"]
    assert short_names(["a.b:f", "c:f"]) == ["a.b:f", "c:f"]


def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_with_its_columns(solution_str, ground_truth): ...
def of_openrlhf(queries, prompts, labels): ...
def of_slime(args, sample, **kwargs): ...
def of_verifiers(completion, answer, **kwargs): ...
def with_state_of_verifiers(prompts, completions, state): ...


FOREIGN = [
    (verl, "verl"), (verl_with_its_columns, "verl"), (of_openrlhf, "OpenRLHF"), (of_slime, "slime"),
    (of_verifiers, "verifiers"), (with_state_of_verifiers, "verifiers"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "project"), FOREIGN)
def test_a_signature_of_another_project_is_named_with_what_to_write(function, project):
    missing = missing_arguments(function, ["ground_truth", "answer"])
    said = foreign_signature(function, missing)
    assert said.startswith(f"It has the signature of {project}. ")
    assert "def reward(prompts, completions, answer, **columns)" in said
    assert ("verl(None, c, a, None)" in said) == (function is verl)


def test_a_missing_column_alone_is_no_signature_of_another_project():
    def mine(completions, solution): ...

    assert foreign_signature(mine, missing_arguments(mine, ["answer"])) == ""
