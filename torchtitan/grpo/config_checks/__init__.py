# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Refuses configurations that cannot work, before any process group exists.

Nothing here needs a device.
"""

from collections.abc import Callable

from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.environments import environments_of
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import (
    environments,
    judge,
    learning,
    lending,
    lora,
    prompts,
    ranges,
    rollouts,
    servers,
    trainer,
    unread,
)
from torchtitan.grpo.config_checks.rollouts import length_warnings, longest_sequence
from torchtitan.grpo.config_checks.rules import ConfigError
from torchtitan.grpo.config_checks.servers import unused_server_settings
from torchtitan.grpo.config_checks.trainer import check_model

__all__ = [
    "ConfigError",
    "check_model",
    "load_config",
    "longest_sequence",
    "validate",
    "warnings_of",
]

_CHECKS = (
    ranges.check_required, prompts.check_prompts, ranges.check_ranges,
    unread.check_unread, learning.check_comparisons, learning.check_policy_loss,
    learning.check_mismatch, trainer.check_optimizer, rollouts.check_lengths,
    rollouts.check_data, rollouts.check_filters, rollouts.check_stream, learning.check_supervised,
    learning.check_teacher, learning.check_critic, rollouts.check_determinism, trainer.check_checkpoints,
    rollouts.check_environments, rollouts.check_agent, prompts.check_evaluation, judge.check_judge,
    trainer.check_machine,
    servers.check_inference, lending.check_cluster, lending.check_lending, lending.check_offload,
    servers.check_weight_sync,
    trainer.check_guards, trainer.check_observe, trainer.check_profiling, lora.check_lora,
    trainer.check_layout,
)  # fmt: skip

_OF_RUN = (unread.check_unread, prompts.check_evaluation, judge.check_judge)
"""Checks that look at all environments together. The others look at each as at a run of its own."""


def load_config(args: list[str]) -> JobConfig:
    """Reads and checks the configuration of a run; the message of a ConfigError is one line."""
    config = read_config(args)
    validate(config)
    return config


def validate(config: JobConfig) -> None:
    """Runs all checks of the configuration itself; ConfigError describes the first problem found."""
    environments.check_tables(config)
    owns = environments_of(config)
    for check in _CHECKS:
        subjects = {"": config} if check in _OF_RUN else owns
        problems = {name: _problem(check, own) for name, own in subjects.items()}
        for name, problem in problems.items():
            if problem is not None:
                is_common = len(set(problems.values())) == 1
                raise ConfigError(problem if is_common else f"environments.{name}: {problem}")


def warnings_of(config: JobConfig) -> list[str]:
    """Returns warnings about settings that work, but probably not as the user intended."""
    return [*unused_server_settings(config), *length_warnings(config)]


def _problem(check: Callable[[JobConfig], None], config: JobConfig) -> str | None:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return None
