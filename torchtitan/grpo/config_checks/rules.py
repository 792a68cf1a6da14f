# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How the checks refuse a setting."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.job_config import JobConfig


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key, and what to do."""


def require(holds: bool, message: str) -> None:
    """Raises :class:`ConfigError` with the message where it does not hold."""
    if not holds:
        raise ConfigError(message)


def get(config: JobConfig, key: str) -> Any:
    """The value of ``table.name``."""
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


_Table = TypeVar("_Table", grpo_config.GRPO, grpo_config.Rollout, grpo_config.WeightSync)


def check_read(
    name: str, table: _Table, read_with: tuple[tuple[Callable[[_Table], bool], str, tuple], ...]
) -> None:
    """Refuses settings that would be ignored; one that is left at its default is no setting."""
    defaults = type(table)()
    for holds, needed, keys in read_with:
        if holds(table):
            continue
        for key in keys:
            value, default = getattr(table, key), getattr(defaults, key)
            require(
                value == default,
                f"{name}.{key} needs {needed}, got {value!r}: nothing would read it. Set what it "
                f"needs, or leave {name}.{key} at its default, {default!r}.",
            )


def check_file(key: str, path: str | None) -> None:
    """Where rank 0 runs, which alone reads it: other machines need not have it."""
    require(
        path is None or not _is_rank_zero_here() or Path(path).is_file(),
        f"{key} must be a file, got {path}.",
    )


def _is_rank_zero_here() -> bool:
    return os.environ.get("GROUP_RANK", "0") == "0"
