# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and checks the configuration of a run.

The tables are torchtitan's and this project's. A misspelt key is refused with the nearest valid
one, a value of the wrong type with its key, and settings that contradict each other before any
process group exists. Nothing in this module needs a device.
"""

from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.config_checks import ConfigError, validate
from torchtitan.grpo.job_config import JobConfig

__all__ = ["ConfigError", "JobConfig", "is_dry_run", "load_config"]


def load_config(args: list[str]) -> JobConfig:
    """Returns the configuration that the command line and its TOML file give, checked.

    Raises:
        ConfigError: If the configuration cannot be used. The message is one line.
    """
    config = read_config(args)
    validate(config)
    return config


def is_dry_run(args: list[str]) -> bool:
    """Removes ``--dry-run`` from the arguments and returns whether it was there."""
    if "--dry-run" not in args:
        return False
    args.remove("--dry-run")
    return True
