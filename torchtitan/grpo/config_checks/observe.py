# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks what a run prints and writes."""

from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig


def check_observe(config: JobConfig) -> None:
    """Refuses to print samples that are not kept."""
    observe = config.observe
    require(
        observe.print_samples <= observe.samples_per_step,
        f"observe.print_samples must be at most observe.samples_per_step "
        f"({observe.samples_per_step}), since samples that are written are printed, got "
        f"{observe.print_samples}. Raise observe.samples_per_step.",
    )
