# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks what a run prints, writes and serves."""

import os

from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.monitoring.addresses import KEY_VARIABLE, is_loopback


def check_observe(config: JobConfig) -> None:
    """Refuses to print samples that are not kept, and to serve others than this host without a key."""
    observe = config.observe
    require(
        observe.print_samples <= observe.samples_per_step,
        f"observe.print_samples must be at most observe.samples_per_step "
        f"({observe.samples_per_step}), since samples that are written are printed, got "
        f"{observe.print_samples}. Raise observe.samples_per_step.",
    )
    require(
        not observe.monitor
        or is_loopback(observe.monitor_host)
        or bool(os.environ.get(KEY_VARIABLE)),
        f"observe.monitor_host = {observe.monitor_host!r} lets other hosts read the metrics, which "
        f"needs a key in the environment variable {KEY_VARIABLE}, got none. Set it, or leave "
        "observe.monitor_host at 127.0.0.1.",
    )
