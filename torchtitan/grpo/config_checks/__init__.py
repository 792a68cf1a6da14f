# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Refuses configurations that cannot work, before any process group exists.

Each file checks one subject. `ranges.py` enforces the bounds that stand at the fields of the
tables; the other files find settings that contradict each other, or that nothing would read. No
check needs a device.
"""

from torchtitan.grpo.config_checks.checkpoints import check_checkpoints
from torchtitan.grpo.config_checks.data import check_data, check_lengths, longest_sequence
from torchtitan.grpo.config_checks.determinism import check_determinism
from torchtitan.grpo.config_checks.dispatch import check_dispatch
from torchtitan.grpo.config_checks.environments import check_environments
from torchtitan.grpo.config_checks.evaluation import check_evaluation
from torchtitan.grpo.config_checks.filters import check_filters
from torchtitan.grpo.config_checks.guards import check_guards
from torchtitan.grpo.config_checks.lora import check_lora
from torchtitan.grpo.config_checks.losses import check_losses
from torchtitan.grpo.config_checks.machine import check_layout, check_machine, check_model
from torchtitan.grpo.config_checks.observe import check_observe, check_profiling
from torchtitan.grpo.config_checks.optimizer import check_optimizer
from torchtitan.grpo.config_checks.prompts import check_prompts
from torchtitan.grpo.config_checks.ranges import check_ranges, check_refused, check_required
from torchtitan.grpo.config_checks.rules import ConfigError
from torchtitan.grpo.config_checks.servers import (
    check_inference,
    check_weight_sync,
    unused_server_settings,
)
from torchtitan.grpo.config_checks.stream import check_stream
from torchtitan.grpo.config_checks.supervised import check_supervised
from torchtitan.grpo.config_checks.teacher import check_teacher
from torchtitan.grpo.job_config import JobConfig

__all__ = ["ConfigError", "check_model", "longest_sequence", "unused_server_settings", "validate"]


def validate(config: JobConfig) -> None:
    """Runs all checks that need nothing but the configuration.

    Raises:
        ConfigError: If a check fails. The message describes the first problem found.
    """
    for check in (
        check_required,
        check_prompts,
        check_refused,
        check_ranges,
        check_losses,
        check_optimizer,
        check_lengths,
        check_data,
        check_filters,
        check_stream,
        check_supervised,
        check_teacher,
        check_determinism,
        check_checkpoints,
        check_environments,
        check_evaluation,
        check_machine,
        check_inference,
        check_dispatch,
        check_weight_sync,
        check_guards,
        check_observe,
        check_profiling,
        check_lora,
        check_layout,
    ):
        check(config)
