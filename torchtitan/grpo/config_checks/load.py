# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and checks the configuration of a run. Nothing here needs a device or a process group."""

from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import validate


def load_config(args: list[str]) -> JobConfig:
    """Returns a checked configuration; the message of a ConfigError is one line."""
    config = read_config(args)
    validate(config)
    return config
