# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of multi-turn rollouts."""

from torchtitan.grpo.config_checks.rules import check_read, require
from torchtitan.grpo.functions import split_path
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.rollout.environments.environment_worker import BUILTIN

_READ_WITH = (
    (
        lambda rollout: rollout.environment is not None,
        "rollout.environment",
        (
            "environment_options",
            "max_turns",
            "environment_timeout_seconds",
            "environment_workers",
            "earlier_turns",
        ),
    ),
)


def check_environments(config: JobConfig) -> None:
    """Checks the environment's name, and refuses settings that need an environment."""
    rollout, functions = config.rollout, config.reward.functions
    check_read("rollout", rollout, _READ_WITH)
    if rollout.environment is None:
        require(
            "environment" not in functions or not config.has_servers,
            "reward.functions names the built-in 'environment', which returns the reward of "
            "rollout.environment, but rollout.environment is not set. Set it, or name another "
            "reward function.",
        )
        return
    if rollout.environment not in BUILTIN:
        try:
            split_path(rollout.environment, "rollout.environment", BUILTIN)
        except ValueError as error:
            require(False, str(error))
    require(
        rollout.environment != "verifiers" or bool(rollout.environment_options.get("env_id")),
        "rollout.environment = 'verifiers' needs rollout.environment_options = { env_id = ... } "
        f"with the environment's name in verifiers, got {rollout.environment_options}.",
    )
    require(
        not rollout.ignore_eos or bool(rollout.stop_token_ids),
        "rollout.environment with rollout.ignore_eos needs rollout.stop_token_ids, because a turn "
        "ends with a stop token. Set them, or leave rollout.ignore_eos at false.",
    )
