# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records each start of a run in ``<dump_folder>/starts/N/``: configuration and environment."""

import json
import numbers
import os
import platform
import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config import SECRETS
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.run_folder.launch import launch_id
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.types import ServerInfo

if TYPE_CHECKING:
    from torchtitan.grpo.config.job_config import JobConfig

COMMIT_VARIABLE = "TORCHTITAN_GRPO_COMMIT"
"""Names the commit of a source that was copied without its repository."""
_GIT_SECONDS = 5.0
_PACKAGES = (
    *("torchtitan-grpo", "torch", "torchtitan", "transformers", "tokenizers", "safetensors"),
    *("huggingface_hub", "datasets", "numpy", "pyzmq", "vllm", "sglang"),
)
_SECRET_OPTIONS = tuple(f"--{table}.{key}" for table, key in SECRETS)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MASK = "***"


def to_toml(tables: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Returns tables as TOML, with comments at settings that are not the default, masked, or not set."""
    lines = ["# What differs from its default has a comment.", ""]
    for name, table in tables.items():
        usual = defaults.get(name, {})
        lines += [f"[{name}]", *(_setting(k, v, usual.get(k)) for k, v in table.items()), ""]
    return "\n".join(lines)


def _setting(key: str, value: Any, default: Any) -> str:
    mark = f"  # default: {toml_value(default)}" if value != default else ""
    if value is None:
        return f"# {_key(key)} is not set{mark}"
    if value == _MASK:
        return f"# {_key(key)} is set; its value is not kept"
    return f"{_key(key)} = {toml_value(value)}{mark}"


def toml_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    # Numbers of numpy as well, whose repr is no TOML; inf and nan are written as TOML does.
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, dict):
        held = ((_key(str(k)), v) for k, v in value.items() if v is not None)
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in held) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return _quoted(str(value))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    # JSON escapes a string as TOML does, but for one control character.
    return json.dumps(text, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def describe_settings(config: "JobConfig") -> str:
    """Returns the resolved configuration as TOML, with a mark at what differs from the defaults."""
    return to_toml(config.to_dict(), type(config)().to_dict())


def changed_settings(config: "JobConfig") -> dict[str, dict[str, Any]]:
    """Returns value and default of each setting that differs from its default, by its key."""
    usual = type(config)().to_dict()
    return {
        f"{name}.{key}": {"value": value, "default": usual[name].get(key)}
        for name, table in config.to_dict().items()
        for key, value in table.items()
        if value != usual[name].get(key)
    }


def source_commit() -> str | None:
    folder = Path(__file__).resolve().parents[1]
    return git_commit(folder) or os.environ.get(COMMIT_VARIABLE) or _installed_commit()


def git_commit(folder: Path) -> str | None:
    """Returns the commit of a source folder, with ``-dirty`` if files differ, or None without a repository."""
    # An installed package may lie in somebody else's repository, which does not track it.
    if not _git(folder, "ls-files", "__init__.py"):
        return None
    # Without tags, the description is the commit itself and not its distance from a tag.
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=_GIT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _installed_commit() -> str | None:
    """The commit that pip recorded at installation from a repository's URL."""
    try:
        record = metadata.distribution("torchtitan-grpo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(record or "{}").get("vcs_info", {}).get("commit_id")


def package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def record_start(
    config: "JobConfig", step: int, arguments: Sequence[str], servers: Sequence[ServerInfo]
) -> Path:
    starts = Path(config.job.dump_folder) / STARTS_FOLDER
    starts.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in starts.iterdir() if path.name.isdecimal()]
    folder = starts / str(max(numbers, default=0) + 1)
    folder.mkdir()
    head = f"# Configuration of a run as it was started after {step} steps.\n"
    (folder / "config.toml").write_text(head + describe_settings(config), encoding="utf-8")
    content = environment(step, arguments) | {"servers": [asdict(server) for server in servers]}
    text = strict_json.dumps(content, indent=2, default=str) + "\n"
    (folder / "environment.json").write_text(text, encoding="utf-8")
    return folder


def environment(step: int, arguments: Sequence[str]) -> dict[str, Any]:
    import torch

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
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "commit": source_commit(),
    }


def without_keys(arguments: Sequence[str]) -> list[str]:
    masked: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = name.replace("-", "_").replace("__", "--", 1) in _SECRET_OPTIONS
        masked.append("***" if is_value else f"{name}=***" if is_secret and equals else argument)
        is_value = is_secret and not equals
    return masked
