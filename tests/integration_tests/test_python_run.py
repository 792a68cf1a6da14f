# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs that scripts start, and how they end with the script."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_SECONDS = 400

READER = """
import json, pathlib
for cell in json.loads(pathlib.Path("read_a_run.ipynb").read_text())["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]))
"""

SCRIPT = """
import os, signal, sys, time
from torchtitan.grpo import RunError, run

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def right(completions, answer, **columns):
    return [float(text == expected) for text, expected in zip(completions, answer)]

def start(steps, **settings):
    return run(
        "train_configs/quickstart.toml", reward=[right, "partial_match"], ranks=1,
        job={"dump_folder": "out"}, training={"steps": steps}, evaluation={"path": None},
        checkpoint={"enable": True}, workers={"pass_variables": ["TORCH_GRPO_TEST_MARK"]},
        grpo={"prompts_per_step": 2, "stop_timeout_seconds": 60} | settings,
    )

try:
    start(1000, group_size=0).result()
except RunError as error:
    print("refused:", error)
try:
    for step in (training := start(1000)):
        print("first", step["step"], "reward/right" in step)
        if step["step"] == 2:
            raise LookupError
except LookupError:
    print("left", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
for step in start(1000):
    print("second", step["step"], flush=True)
"""


@pytest.fixture
def script(make_run, tmp_path: Path, repository: Path):
    """Starts a script in a folder of its own, from which the shipped paths can be read."""
    for name in ("assets", "train_configs", "docs"):
        (tmp_path / name).symlink_to(repository / name)

    def start(*words: str):
        run = make_run(name="script")
        run.start_command(sys.executable, "-u", *words, cwd=tmp_path)
        return run

    return start


def test_the_example_learns_from_a_function_of_the_script(script, tmp_path, repository):
    run = script(str(repository / "examples/from_python.py"), "3")
    assert run.finish(PATIENCE_SECONDS) == 0, run.console[-6000:]
    run.wait_until_processes_end()
    shown = dict(re.findall(r"^step +(\d) +reward (0\.\d{3})$", run.console, re.MULTILINE))
    folder = tmp_path / "outputs/from_python"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert shown == {str(i): f"{reward:.3f}" for i, reward in enumerate(rewards, 1)}
    assert len(shown) == 3 and "step 1/3" not in run.console
    assert "Exact match on held-out prompts: 0." in run.console
    assert f"The trained model is in {folder}/hf/step-3\n" in run.console
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/read_a_run.ipynb").symlink_to(repository / "examples/read_a_run.ipynb")
    notebook = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER], cwd=tmp_path / "examples",
        env=os.environ | {"MPLBACKEND": "Agg"}, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert f"3 steps; reward {rewards[-1]:.3f}" in notebook.stdout
    assert notebook.stdout.count("->'") == 4 * 8, "four prompts with their groups"


def test_processes_end_with_the_loop_and_with_the_script(script, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = script("script.py")
    run.wait_for(lambda: "left\n" in run.console, PATIENCE_SECONDS)
    run.wait_for(lambda: [p.pid for p in run.left_behind()] == [run.process.pid], 60)
    assert "refused: grpo.group_size must be at least 1, got 0." in run.console
    assert "first 1 True\nfirst 2 True\n" in run.console
    stopped = int(re.findall(r"^Stopped after step (\d+)", run.console, re.MULTILINE)[0])
    (tmp_path / "go").touch()
    run.wait_for(lambda: re.search(r"^second \d+$", run.console, re.MULTILINE), PATIENCE_SECONDS)
    # The resumed run yields its own steps alone, and knows the function under its old name.
    assert re.findall(r"^second (\d+)$", run.console, re.MULTILINE)[0] == str(stopped + 1)
    assert "reward.functions:" not in run.console
    run.process.send_signal(signal.SIGINT)
    assert run.finish(PATIENCE_SECONDS) == -signal.SIGINT, run.console[-6000:]
    assert run.console.count("Stopped after step") == 2
    assert "KeyboardInterrupt" in run.console
    run.wait_until_processes_end()
