# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the form of ``[environments]``; the values of its settings are checked like those of a run."""

import difflib
import math
import re
from dataclasses import fields
from typing import Any

import msgspec

from torchtitan.grpo.config import Agent, Prompts, Reward, Rollout
from torchtitan.grpo.config.environments import OWN_KEYS, WEIGHT, environment_weights, own_key
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import require

_TABLES = {"prompts": Prompts, "rollout": Rollout, "reward": Reward, "agent": Agent}


def check_tables(config: JobConfig) -> None:
    """Refuses tables that `environments_of` cannot read, and settings of the run that conflict with them."""
    environments, prompts = config.environments, config.prompts
    if not environments:
        return
    for name, given in environments.items():
        require(
            re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None,
            "A name in environments is part of the names of metrics, and must have letters, digits, '_' "
            f"and '-' alone, got {name!r}.",
        )
        for key, value in given.items():
            _check_part(name, key, value)
        _check_own(config, name, given)
    for key, value in (("path", prompts.path), ("paths", prompts.paths)):
        require(
            not value,
            f"prompts.{key} and environments cannot be combined: each environment has its own "
            f"prompts.path, got {value!r}. Remove prompts.{key}, or make it an environment.",
        )
    _check_replaced(config)
    require(
        len(environment_weights(config)) in (0, len(environments)),
        f"environments.NAME.weight must be set in all environments, or in none to weight them by "
        f"their numbers of prompts, got it in {len(environment_weights(config))} of "
        f"{len(environments)}.",
    )


def _check_replaced(config: JobConfig) -> None:
    """Refuses a setting of the run that every environment replaces."""
    environments = config.environments.values()
    for table, keys in OWN_KEYS.items():
        for key in (k for k in keys if all(k in given.get(table, {}) for given in environments)):
            value = getattr(getattr(config, table), key)
            require(
                value == getattr(_TABLES[table](), key) or key == "max_new_tokens",
                f"{table}.{key} must be left out if every environment sets its own, got {value!r}, "
                f"which nothing would read. Remove it, or environments.NAME.{table}.{key}.",
            )


def _check_part(name: str, key: str, value: Any) -> None:
    if key == WEIGHT:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(
            is_number and value > 0 and math.isfinite(value),
            f"environments.{name}.weight must be a finite number above 0, got {value!r}.",
        )
        return
    known = (WEIGHT, *OWN_KEYS)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(known)}."
    require(key in known, f"Unknown key environments.{name}.{key}. {hint}")
    require(
        isinstance(value, dict),
        f"environments.{name}.{key} must be a table, as in environments.{name}.{key}."
        f"{OWN_KEYS[key][0]} = ..., got {value!r}.",
    )
    for setting in value:
        _check_setting(name, key, setting)
    try:
        msgspec.convert(value, type=_TABLES[key])
    except msgspec.ValidationError as error:
        message = re.sub(r"`\$\.(.*)`", rf"environments.{name}.{key}.\1", str(error))
        require(False, f"{message}. Change the value.")


def _check_setting(name: str, table: str, setting: str) -> None:
    own, known = OWN_KEYS[table], [f.name for f in fields(_TABLES[table])]
    if setting in own:
        return
    (near,) = difflib.get_close_matches(setting, known, n=1, cutoff=0.5) or ("",)
    hint = f"Did you mean {near}?" if near in own else f"It may have {', '.join(own)}."
    if (table, setting) in (("prompts", "paths"), ("prompts", "weights")):
        hint = "An environment has one prompts.path. Make each set an environment with a weight."
    elif setting in known:
        hint = f"{table}.{setting} applies to all environments: move it to [{table}]."
    require(False, f"Unknown key environments.{name}.{table}.{setting}. {hint}")


def _check_own(config: JobConfig, name: str, given: dict[str, Any]) -> None:
    require(
        bool(given.get("prompts", {}).get("path")),
        f"{own_key(name, 'prompts.path')} must name the prompts of the environment, got nothing.",
    )
    most = config.rollout.max_new_tokens
    own = given.get("rollout", {}).get("max_new_tokens", most)
    require(
        own <= most,
        f"{own_key(name, 'rollout.max_new_tokens')} must be at most rollout.max_new_tokens ({most}), "
        f"which is the limit of all environments, got {own}. Raise rollout.max_new_tokens.",
    )
