# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and checks the configuration of a run. Nothing here needs a device or a process group."""

from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.config_checks import ConfigError, validate
from torchtitan.grpo.job_config import JobConfig

__all__ = ["ConfigError", "JobConfig", "load_config"]


def load_config(args: list[str]) -> JobConfig:
    """Returns the configuration that the command line and its TOML file give, checked.

    Raises:
        ConfigError: If the configuration cannot be used. The message is one line.
    """
    config = read_config(args)
    validate(config)
    return config
