# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[environments.NAME]``, each of which replaces settings of a run for its prompts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torchtitan.grpo.config.prompts import Prompts
from torchtitan.grpo.config.rollout import Agent, Reward, Rollout

OWN_KEYS: dict[str, tuple[str, ...]] = {
    "prompts": (
        *("path", "split", "name", "column", "rename", "template", "system_prompt"),
        "max_prompt_tokens",
    ),
    "rollout": (
        *("environment", "environment_options", "environment_timeout_seconds"),
        *("environment_workers", "max_turns", "earlier_turns", "max_new_tokens"),
        *("min_completion_tokens", "drop_truncated", "should_accept"),
    ),
    "reward": ("functions", "weights", "unscorable_value"),
    "agent": ("command", "function", "options", "workers", "timeout_seconds", "allow_sampling"),
}
"""For each table, the keys that an environment may set. The others apply to the whole run."""

WEIGHT = "weight"
"""The key of an environment that is not in a table."""


class HasEnvironments(Protocol):
    """The configuration of a run, or the part of it that the rollout process gets."""

    prompts: Prompts
    rollout: Rollout
    reward: Reward
    agent: Agent
    environments: dict[str, dict[str, Any]]


_Config = TypeVar("_Config", bound=HasEnvironments)


def environments_of(config: _Config) -> dict[str, _Config]:
    """Returns the whole configuration of each environment by its name, in the order of the names.

    Without ``[environments]``, the only entry is the configuration itself, under an empty name. The
    settings must have been checked (`config_checks/environments.py`).
    """
    if not config.environments:
        return {"": config}
    return {name: _of(config, config.environments[name]) for name in sorted(config.environments)}


def _of(config: _Config, given: Mapping[str, Any]) -> _Config:
    tables = {
        table: replace(getattr(config, table), **given[table])
        for table in OWN_KEYS
        if table in given
    }
    return replace(config, **tables, environments={})  # pyright: ignore[reportArgumentType, reportCallIssue]


def environment_weights(config: HasEnvironments) -> list[float]:
    """Returns the environments' weights, in the order of `environments_of`; empty if none are set."""
    given = [config.environments[name].get(WEIGHT) for name in sorted(config.environments)]
    return [weight for weight in given if weight is not None]


def own_key(name: str, setting: str) -> str:
    """Returns the TOML key of an environment's setting, for messages; without a name, the run's own key."""
    return f"environments.{name}.{setting}" if name else setting


def setting_of(key: str) -> str:
    """Returns the run's key that an environment's key overrides; any other key is returned unchanged."""
    return key.split(".", 2)[2] if key.startswith("environments.") else key


def own_settings(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that environments set, by full keys such as ``environments.NAME.table.key``."""
    found: dict[str, Any] = {}
    for name, given in environments.items():
        tables = {key: value for key, value in given.items() if key != WEIGHT}
        found |= {own_key(name, WEIGHT): given[WEIGHT]} if WEIGHT in given else {}
        for table, values in tables.items():
            found |= {own_key(name, f"{table}.{key}"): value for key, value in values.items()}
    return found


def reward_functions(config: HasEnvironments) -> list[str]:
    """Returns the reward functions of all environments, each once."""
    of_all = (f for own in environments_of(config).values() for f in own.reward.functions)
    return list(dict.fromkeys(of_all))
