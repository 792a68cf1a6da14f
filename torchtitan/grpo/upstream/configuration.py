# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables of the configuration that our own extend.

0.3.0 has none of these dataclasses, and no TOML. A move would copy them into `grpo/config/`.
"""

from torchtitan.config import ConfigManager, JobConfig, Profiling, job_config
from torchtitan.config.job_config import LRScheduler, Parallelism

__all__ = ["ConfigManager", "JobConfig", "LRScheduler", "Parallelism", "Profiling", "job_config"]
