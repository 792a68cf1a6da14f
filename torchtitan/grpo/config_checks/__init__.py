# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Refuses configurations that cannot work, before any process group exists."""

from torchtitan.grpo.config_checks.learning import check_losses, check_supervised, check_teacher
from torchtitan.grpo.config_checks.lora import check_lora
from torchtitan.grpo.config_checks.observe import check_guards, check_observe, check_profiling
from torchtitan.grpo.config_checks.prompts import check_evaluation, check_prompts
from torchtitan.grpo.config_checks.ranges import check_ranges, check_refused, check_required
from torchtitan.grpo.config_checks.rollouts import (
    check_data,
    check_determinism,
    check_dispatch,
    check_environments,
    check_filters,
    check_lengths,
    check_stream,
    longest_sequence,
)
from torchtitan.grpo.config_checks.rules import ConfigError
from torchtitan.grpo.config_checks.servers import (
    check_inference,
    check_weight_sync,
    unused_server_settings,
)
from torchtitan.grpo.config_checks.trainer import (
    check_checkpoints,
    check_layout,
    check_machine,
    check_model,
    check_optimizer,
)
from torchtitan.grpo.config_checks.unread import check_unread
from torchtitan.grpo.job_config import JobConfig

__all__ = ["ConfigError", "check_model", "longest_sequence", "unused_server_settings", "validate"]


def validate(config: JobConfig) -> None:
    """Runs all checks of the configuration itself; ConfigError describes the first problem found."""
    for check in (
        check_required,
        check_prompts,
        check_refused,
        check_ranges,
        check_unread,
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
