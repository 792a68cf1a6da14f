# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The smallest configuration that passes every check, for tests of single settings."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import load_config

LIVE = (
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
    "--inference.launch",
)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., JobConfig]:
    """Loads it with a TOML text and with further arguments; {file} and {folder} exist."""

    def load(arguments: str = "", toml: str = "") -> JobConfig:
        (file := tmp_path / "file.jsonl").write_text("{}\n")
        (folder := tmp_path / "folder").mkdir(exist_ok=True)
        (run := tmp_path / "run.toml").write_text(toml)
        given = arguments.replace("{file}", str(file)).replace("{folder}", str(folder))
        return load_config([f"--job.config_file={run}", *LIVE, *shlex.split(given)])

    return load
