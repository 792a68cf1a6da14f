# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps with each start of a run what it was started with.

``<dump_folder>/starts/N/`` holds, for the N-th start of the run, ``config.toml`` (the resolved
configuration, keys masked) and ``environment.json`` (command, versions, commit, machine).
"""

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan.grpo import strict_json
from torchtitan.grpo.job_config import SECRETS, JobConfig
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.run_folder.launch import launch_id
from torchtitan.grpo.run_folder.packages import package_versions
from torchtitan.grpo.run_folder.source_commit import source_commit
from torchtitan.grpo.run_folder.toml_text import to_toml
from torchtitan.grpo.types import ServerInfo

_SECRET_OPTIONS = tuple(f"--{table}.{key}" for table, key in SECRETS)


def record_start(
    config: JobConfig, step: int, arguments: Sequence[str], servers: Sequence[ServerInfo]
) -> Path:
    """Writes what a run is started with, and returns the folder.

    Args:
        config: Configuration of the run.
        step: Number of steps that the run has taken so far.
        arguments: Command line, without the program's name.
        servers: Servers of the run, of which everything that is known is written.
    """
    folder = _make_next(Path(config.job.dump_folder) / STARTS_FOLDER)
    head = f"# Configuration of a run as it was started after {step} steps.\n\n"
    (folder / "config.toml").write_text(head + to_toml(config.to_dict()), encoding="utf-8")
    content = environment(step, arguments) | {"servers": [asdict(server) for server in servers]}
    text = strict_json.dumps(content, indent=2, default=str) + "\n"
    (folder / "environment.json").write_text(text, encoding="utf-8")
    return folder


def _make_next(starts: Path) -> Path:
    starts.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in starts.iterdir() if path.name.isdecimal()]
    folder = starts / str(max(numbers, default=0) + 1)
    folder.mkdir()
    return folder


def environment(step: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns what a run depends on apart from its configuration."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": step + 1,
        "launch": launch_id(),
        "arguments": without_keys(arguments),
        "num_ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "devices": _devices(),
        "commit": source_commit(),
    }


def without_keys(arguments: Sequence[str]) -> list[str]:
    """Returns command line arguments with the servers' keys masked."""
    masked: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = name.replace("-", "_").replace("__", "--", 1) in _SECRET_OPTIONS
        masked.append("***" if is_value else f"{name}=***" if is_secret and equals else argument)
        is_value = is_secret and not equals
    return masked


def _devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
