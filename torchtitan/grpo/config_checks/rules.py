# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines what all checks share: the error, and the functions that refuse a setting."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.command_line.errors import ConfigError
from torchtitan.grpo.job_config import SECRETS, JobConfig, Optimizer
from torchtitan.grpo.system.files import NotRegularError, check_regular


def require(holds: bool, message: str) -> None:
    """Raises :class:`ConfigError` with ``message`` unless ``holds``."""
    if not holds:
        raise ConfigError(message)


def get(config: JobConfig, key: str) -> Any:
    """Returns the value of the key ``table.name``."""
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


_Table = TypeVar(
    "_Table",
    grpo_config.Inference,
    grpo_config.GRPO,
    grpo_config.Guards,
    grpo_config.LoRA,
    grpo_config.Rollout,
    grpo_config.SFT,
    grpo_config.Teacher,
    grpo_config.WeightSync,
    Optimizer,
)


def check_read(
    name: str, table: _Table, read_with: tuple[tuple[Callable[[_Table], bool], str, tuple], ...]
) -> None:
    """Refuses keys that are set and would be ignored. A key at its default counts as not set.

    Args:
        name: Name of the table, for the message.
        table: Its values.
        read_with: Rows of a condition, the condition in words, and the keys that are read only
            if it holds.
    """
    defaults = type(table)()
    for holds, needed, keys in read_with:
        if holds(table):
            continue
        for key in keys:
            value, default = getattr(table, key), getattr(defaults, key)
            shown = "a value" if (name, key) in SECRETS else repr(value)
            require(
                value == default,
                f"{name}.{key} needs {needed}, got {shown}, which nothing would read. Set what it "
                f"needs, or leave {name}.{key} at its default, {default!r}.",
            )


def check_file(key: str, path: str | None) -> None:
    """Requires a file on the machine of rank 0. Other machines do not read it."""
    if path is None or not _is_rank_zero_here():
        return
    try:
        check_regular(path)
    except NotRegularError as error:
        raise ConfigError(f"{key} = {error}.") from error
    except OSError as error:
        raise ConfigError(f"{key} must be a file, got {path}.") from error


def _is_rank_zero_here() -> bool:
    return os.environ.get("GROUP_RANK", "0") == "0"
