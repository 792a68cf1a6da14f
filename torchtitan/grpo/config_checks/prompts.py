# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the prompts of training and evaluation."""

import difflib
import math
import re
import string
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.grpo.config import Evaluation, Prompts
from torchtitan.grpo.config.bounds import bounds_of
from torchtitan.grpo.config.environments import environments_of, own_key
from torchtitan.grpo.config.evaluation import EvaluationSet, evaluation_sets, set_key
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import FILE_ENDINGS, check_file, require

_RENDERING = ("add_generation_prompt", "continue_final_message", "messages", "tokenize")


def check_prompts(config: JobConfig) -> None:
    prompts = config.prompts
    _check_template(prompts.template)
    if not config.has_servers:
        return  # recorded rollouts and supervised examples have their prompts
    require(
        not (prompts.path and prompts.paths),
        f"Set prompts.path or prompts.paths, not both, got {prompts.path!r} and {prompts.paths}.",
    )
    require(
        bool(prompts.path or prompts.paths),
        "prompts.path must name a set of prompts, or prompts.paths several sets; got neither.",
    )
    _check_paths(prompts.paths)
    _check_weights(prompts)
    for name in prompts.chat_template_kwargs:
        require(
            name not in _RENDERING,
            f"prompts.chat_template_kwargs must hold variables of the template, got {name!r}, which "
            "the run sets itself. Remove it.",
        )


def _check_paths(paths: list[str]) -> None:
    require(all(paths), f"prompts.paths must name a set in each entry, got {paths}.")
    require(
        len(set(paths)) == len(paths),
        f"prompts.paths must name each set once, got {paths}. Raise an entry of prompts.weights to "
        "draw from a set more often.",
    )
    for path in paths:
        # Any other path may be the name of a data set, which is looked up when it is opened.
        if path.endswith(FILE_ENDINGS) and not Path(path).is_dir():
            check_file(f"Each of prompts.paths that ends in one of {FILE_ENDINGS}", path)


def _check_weights(prompts: Prompts) -> None:
    weights, paths = prompts.weights, prompts.paths
    require(
        not weights or bool(paths),
        f"prompts.weights needs prompts.paths, got {weights} and a single set. Set prompts.paths, or "
        "remove prompts.weights.",
    )
    require(
        len(weights) in (0, len(paths)),
        f"prompts.weights must have one entry for each of the {len(paths)} prompts.paths, or be "
        f"empty to weight sets by their sizes, got {len(weights)} entries.",
    )
    require(
        all(weight > 0 and math.isfinite(weight) for weight in weights),
        f"prompts.weights must be finite and above 0, got {weights}. Remove a set that should not be "
        "used from prompts.paths.",
    )


def _check_template(template: str | None) -> None:
    """Refuses a template that gives all prompts the same text."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template or "")]
    except ValueError:  # the first prompt tells what is wrong
        return
    require(
        template is None or any(fields),
        f"prompts.template must contain {{prompt}} or another column in braces, got {template!r}, with "
        "which all prompts would be the same. Insert {prompt}, or remove prompts.template.",
    )


_KEYS = [f.name for f in fields(EvaluationSet)]


def check_evaluation(config: JobConfig) -> None:
    evaluation = config.evaluation
    require(
        evaluation.path is None or not evaluation.sets,
        "Set evaluation.path for one set of held-out prompts or evaluation.sets for several, not "
        f"both, got {evaluation.path!r} and the sets {list(evaluation.sets)}.",
    )
    for name, given in evaluation.sets.items():
        _check_given(name, given)
    for name, settings in evaluation_sets(evaluation).items():
        _check_set(evaluation, name, settings)
        if config.has_servers:
            _check_environment(config, set_key(evaluation, name, "environment"), settings)


def _check_environment(config: JobConfig, key: str, settings: EvaluationSet) -> None:
    known, name = sorted(config.environments), settings.environment
    require(
        bool(known) or name is None,
        f"{key} needs [environments], got {name!r}, and there is one environment alone. Remove it.",
    )
    require(
        not known or name in known,
        f"{key} must name the environment with whose settings the set is evaluated, one of "
        f"{', '.join(known)}, got {name or 'nothing'!r}.",
    )
    own = environments_of(config)[name or ""]
    require(
        settings.function not in ("environment", "agent")
        or own.rollout.environment is not None
        or own.agent.is_used,
        f"{key.removesuffix('environment')}function = {settings.function!r} is the reward of an "
        f"episode, but neither {own_key(name or '', 'rollout.environment')} nor "
        f"{own_key(name or '', 'agent')} is set. Name another function.",
    )


def _check_given(name: str, given: Any) -> None:
    require(
        re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None,
        f"A name in evaluation.sets is part of the names of metrics, and must have letters, digits, "
        f"'_', '-' and '.' alone, got {name!r}.",
    )
    require(
        isinstance(given, dict),
        f"evaluation.sets.{name} must be a table [evaluation.sets.{name}] with a path, got {given!r}.",
    )
    for key in given:
        near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"It has the keys {', '.join(_KEYS)}."
        if key in {f.name for f in fields(Evaluation)} - set(_KEYS):
            hint = f"evaluation.{key} applies to all sets: move it to [evaluation]."
        require(key in _KEYS, f"Unknown key evaluation.sets.{name}.{key}. {hint}")
    try:
        msgspec.convert(given, type=EvaluationSet)
    except msgspec.ValidationError as error:
        message = re.sub(r"`\$\.(.*)`", rf"evaluation.sets.{name}.\1", str(error))
        require(False, f"{message}. Change the value.")
    require(
        bool(given.get("path")),
        f"evaluation.sets.{name}.path must name held-out prompts, got nothing.",
    )


def _check_set(evaluation: Evaluation, name: str, settings: EvaluationSet) -> None:
    def key(setting: str) -> str:
        return set_key(evaluation, name, setting)

    for setting, bounds in bounds_of(EvaluationSet).items():
        value = getattr(settings, setting)
        require(bounds.allow(value), f"{key(setting)} must be {bounds}, got {value}.")
    for k in settings.pass_at:
        require(
            1 <= k <= settings.num_samples,
            f"Each entry of {key('pass_at')} must be at least 1 and at most {key('num_samples')} "
            f"({settings.num_samples}), got {k}. Raise num_samples: pass@k is estimated from more "
            "than k completions of each prompt, or from k.",
        )
    if settings.temperature > 0:
        return
    require(
        settings.num_samples == 1,
        f"{key('num_samples')} = {settings.num_samples} needs {key('temperature')} above 0, got 0: "
        "greedy decoding gives the same completion each time. Set a temperature.",
    )
    for setting in ("top_p", "top_k"):
        value, default = getattr(settings, setting), getattr(EvaluationSet(), setting)
        require(
            value == default,
            f"{key(setting)} needs {key('temperature')} above 0, got {value}, which greedy decoding "
            f"does not read. Set a temperature, or leave it at {default}.",
        )
