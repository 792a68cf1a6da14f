# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The exception that all checks raise, and the functions that they share."""

import operator
import os
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.config.command_line import ConfigError, refusing
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.files import NotRegularError, check_regular

__all__ = ["ConfigError", "check_file", "forbid", "get", "refusing", "require"]

FILE_ENDINGS = (".jsonl", ".json", ".parquet")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def forbid(with_setting: str, conflicts: Mapping[str, bool], why: str) -> None:
    """Raises ConfigError for the first of ``conflicts`` that is set: ``with_setting`` excludes it."""
    for setting, is_set in conflicts.items():
        require(not is_set, f"{with_setting} and {setting} cannot be combined: {why}")


def get(config: JobConfig, key: str) -> Any:
    return operator.attrgetter(key)(config)


def check_file(key: str, path: str | None) -> None:
    """Requires that ``path``, if given, is a file on rank 0's machine; other machines do not read the file."""
    if path is None or os.environ.get("GROUP_RANK", "0") != "0":
        return
    try:
        check_regular(path)
    except NotRegularError as error:
        raise ConfigError(f"{key} = {error}.") from error
    except OSError as error:
        raise ConfigError(f"{key} must be a file, got {path}.") from error
