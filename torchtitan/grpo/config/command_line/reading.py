# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Merges the command line into a TOML file, and that into the defaults, without checking values."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.arguments import Override, read_arguments
from torchtitan.grpo.config.command_line.keys import answer_to_value, unknown_keys
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.file_formats import UTF8_MARK, other_format
from torchtitan.grpo.system.files import read_regular

_KEY_VARIABLES: dict[tuple[str, ...], str] = {
    ("inference", "api_key"): "TORCHTITAN_GRPO_API_KEY",
    ("inference", "admin_key"): "TORCHTITAN_GRPO_ADMIN_KEY",
    ("teacher", "api_key"): "TORCHTITAN_GRPO_TEACHER_KEY",
}


def read_config(args: list[str]) -> JobConfig:
    """Reads the command line and its TOML file; ConfigError has a line for each mistake."""
    data = _read_toml(_last_value(args, "job.config_file"))
    overrides, wrong = read_arguments(JobConfig, args)
    _refuse_secrets(overrides)
    if wrong := [*unknown_keys(JobConfig, data), *wrong]:
        raise ConfigError("\n".join(wrong))
    for override in overrides:
        _put(data, override)
    return _converted(data)


def _refuse_secrets(overrides: list[Override]) -> None:
    """Refuses API keys on the command line, because `ps` shows them and experiment trackers keep them."""
    for path, _ in overrides:
        if variable := _KEY_VARIABLES.get(path[:2]):
            raise ConfigError(
                f"--{'.'.join(path)} must not stand on the command line: every user of the machine "
                f"can list it, and wandb keeps it. Set the environment variable {variable}, or "
                f"{path[1]} in [{path[0]}] of a TOML file that only you can read (chmod 600)."
            )


def _last_value(args: list[str], key: str) -> str | None:
    """Returns the last value that ``args`` give to a setting, or None; other arguments are not parsed."""
    found = None
    for arg, following in zip(args, [*args[1:], None], strict=False):
        option, equals, value = arg.partition("=")
        if option.removeprefix("--").replace("-", "_") == key and option.startswith("--"):
            found = value if equals else following
    return found


def _read_toml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = read_regular(path)
        return tomllib.loads(content.removeprefix(UTF8_MARK).decode())
    except FileNotFoundError as error:
        raise ConfigError(
            f"--job.config_file must name a file that exists, got {path} (relative paths are read "
            f"from {Path.cwd()})."
        ) from error
    except OSError as error:
        raise ConfigError(f"--job.config_file must be a readable file: {error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if found := other_format(content, path):
            raise ConfigError(f"--job.config_file {path} is not TOML: {found}") from error
        raise ConfigError(f"--job.config_file is not valid TOML: {error} ({path}).") from error


def _put(data: dict[str, Any], override: Override) -> None:
    """Sets a value in parsed TOML data. Anything on the value's path that is no table is replaced by one."""
    (*tables, name), value = override
    for table in tables:
        inner = data.get(table)
        data[table] = data = dict(inner) if isinstance(inner, dict) else {}
    data[name] = value


def _converted(data: dict[str, Any]) -> JobConfig:
    try:
        return msgspec.convert(data, type=JobConfig)
    except msgspec.ValidationError as error:
        message = re.sub(r"`\$\.(.*)`", r"\1", str(error))
        key, value = message.rpartition(" ")[2], data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        hint = answer_to_value(key, value)
        raise ConfigError(
            f"{message.removesuffix('.')}. {hint}{' ' if hint else ''}Change it."
        ) from error
