# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The error and the functions of all checks."""

import os
from typing import Any

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.system.files import NotRegularError, check_regular


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def get(config: JobConfig, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


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
