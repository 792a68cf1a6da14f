# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The newest torch that pyproject.toml allows trains as well as the pinned one."""

import json
import os
import subprocess
from pathlib import Path

import pytest

_INSTALL_SECONDS = 1800
_RUN_SECONDS = 900


@pytest.fixture(scope="module")
def checkout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose environment has the newest torch. torch for Linux is a CUDA build on PyPI."""
    source = tmp_path_factory.mktemp("newest") / "source"
    _run(["git", "clone", "-q", str(repository), str(source)], source.parent, 60)
    _run(["python3", "-m", "venv", ".venv"], source, 60)
    # Without torch, install.sh would install the pinned one.
    _run([".venv/bin/python", "-m", "pip", "install", "-q", "torch<2.16"], source, _INSTALL_SECONDS)
    _run(["bash", "scripts/install.sh", "--cpu"], source, _INSTALL_SECONDS)
    return source


def _run(command: list[str], folder: Path, seconds: float) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(2 * _INSTALL_SECONDS)
@pytest.mark.parametrize("layout", ["", "_tensor_parallel", "_zero_bubble", "_context_parallel"])
def test_the_newest_torch_trains_in_each_kind_of_layout(checkout: Path, layout: str):
    folder = checkout / "outputs" / f"run{layout}"
    _run(
        [
            *(".venv/bin/torchtitan-grpo", "train", f"train_configs/quickstart{layout}.toml"),
            *("--training.steps", "3", "--evaluation.num_prompts", "4"),
            *("--job.dump_folder", str(folder)),
        ],
        checkout,
        _RUN_SECONDS,
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == summary["server_version"] == 3
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["mismatch/kl"] < 1e-9, "trainer and server compute the same"
    packages = json.loads((folder / "starts/1/environment.json").read_text())["packages"]
    assert packages["torch"].split("+")[0] > "2.15", packages
