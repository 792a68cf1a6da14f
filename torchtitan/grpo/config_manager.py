# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads, merges and checks the configuration of a run.

As in torchtitan, whose tables and command line parser are used, the command line takes precedence
over the TOML file, and the file over the defaults. In addition, a misspelt key is refused with the
nearest valid one, a value of the wrong type with its key, and settings that contradict each other
before any process group exists. Nothing in this module needs a device.
"""

import contextlib
import difflib
import io
import re
import sys
import tomllib
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from torchtitan.config import ConfigManager

from torchtitan.grpo.config_checks import ConfigError, validate
from torchtitan.grpo.job_config import JobConfig


class GRPOConfigManager(ConfigManager):
    """Torchtitan's configuration manager, which reads the TOML file more strictly here."""

    def __init__(self) -> None:
        super().__init__(config_cls=JobConfig)

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        try:
            values = super()._maybe_load_toml(args)
        except FileNotFoundError as error:
            raise ConfigError(
                f"--job.config_file must name a file that exists, got {error.filename}."
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--job.config_file is not valid TOML: {error}.") from error
        return values

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> type:
        cls = super()._maybe_add_custom_config(args, toml_values)
        check_arguments(cls, args)
        return cls

    def _dict_to_dataclass(self, cls, data: dict[str, Any]) -> Any:
        check_keys(cls, data)
        try:
            return msgspec.convert(data, type=cls)
        except msgspec.ValidationError as error:
            message = re.sub(r"`\$\.(.*)`", r"\1", str(error))
            raise ConfigError(f"{message}. Change the value in the TOML file.") from error

    def _validate_config(self) -> None:
        """Skips upstream's checks of its own assets. :func:`validate` has this project's checks."""


def load_config(args: list[str]) -> JobConfig:
    """Returns the configuration that the command line and its TOML file give, checked.

    Raises:
        ConfigError: If the configuration cannot be used. The message is one line.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = GRPOConfigManager().parse_args(args)
    except SystemExit as error:
        if error.code in (0, None):  # --help
            raise
        raise ConfigError(_unboxed(said.getvalue())) from error
    sys.stderr.write(said.getvalue())
    assert isinstance(config, JobConfig)
    validate(config)
    return config


def _unboxed(text: str) -> str:
    """Returns tyro's message without the box, the title and the help text around it."""
    lines = " ".join(line.strip("│╭╮╰╯ ") for line in text.splitlines())
    title, *paragraphs = re.split(r"[─-]{4,}", lines)
    message = (paragraphs or [title])[0].strip(" .")
    return f"{message}. Change it on the command line."


def check_arguments(cls: type, args: list[str]) -> None:
    """Refuses arguments ``--table.key`` that no table has, and names the nearest key.

    Keys may be written with ``-`` or ``_``, as ``--key=value``, and flags as ``--table.no-flag``.

    Raises:
        ConfigError: If an argument is unknown. The message names the first one.
    """
    known = _all_keys(cls)
    for arg in args:
        given = arg.partition("=")[0]
        if not given.startswith("--") or given == "--help" or given.startswith("--tyro-"):
            continue
        key = given[2:].replace("-", "_")
        table, _, name = key.rpartition(".")
        if key in known or f"{table}.{name.removeprefix('no_')}" in known:
            continue
        if key.startswith("no_") and key.removeprefix("no_") in known:
            flag_table, _, flag = given[len("--no-") :].rpartition(".")
            raise ConfigError(f"Unknown argument {given}. Did you mean --{flag_table}.no-{flag}?")
        siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        hint = f"Did you mean --{siblings[near[0]]}?" if near else _elsewhere(key, known)
        raise ConfigError(f"Unknown argument {given}. {hint}")


def check_keys(cls: type, data: dict[str, Any], prefix: str = "") -> None:
    """Refuses keys of a TOML file that no table has, and names the nearest key.

    Raises:
        ConfigError: If a key is unknown. The message names the first one.
    """
    known = {f.name: f for f in fields(cls)}
    for key, value in data.items():
        if key not in known:
            everywhere = _all_keys(JobConfig)
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {prefix}{near[0]}?" if near else _elsewhere(key, everywhere)
            raise ConfigError(f"Unknown key {prefix}{key} in the TOML file. {hint}")
        table = known[key].type
        if isinstance(table, type) and is_dataclass(table) and isinstance(value, dict):
            check_keys(table, value, f"{prefix}{key}.")


def _elsewhere(key: str, keys: list[str]) -> str:
    same_name = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    if same_name:
        near = difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
        return f"There is {near[0]}: is it in the wrong table?"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
    return f"The nearest key is {near[0]}."


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for f in fields(cls):
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys += _all_keys(f.type, f"{prefix}{f.name}.")
        else:
            keys.append(prefix + f.name)
    return keys


def is_dry_run(args: list[str]) -> bool:
    """Removes ``--dry-run`` from the arguments and returns whether it was there."""
    if "--dry-run" not in args:
        return False
    args.remove("--dry-run")
    return True
