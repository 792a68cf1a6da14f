# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables of the configuration that our own extend.

0.3.0 has none of these dataclasses, and no TOML. A move would copy them into `grpo/config/`.
"""

from torchtitan.config import job_config
from torchtitan.config.job_config import JobConfig, LRScheduler, Parallelism, Profiling


def compiles_model(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def merged_tables(ours: type, custom: type) -> type:
    """Returns a configuration with the tables of both, as ``job.custom_config_module`` wants it."""
    # Not above: ``--help`` reads the tables without torch, which this import needs.
    from torchtitan.config import ConfigManager

    return ConfigManager._merge_configs(ours, custom)
