# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the sets of held-out prompts."""

import difflib
import re
from dataclasses import fields
from typing import Any

import msgspec

from torchtitan.grpo.config import Evaluation
from torchtitan.grpo.config.bounds import bounds_of
from torchtitan.grpo.config.evaluation import EvaluationSet, evaluation_sets, set_key
from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig

_KEYS = [f.name for f in fields(EvaluationSet)]


def check_evaluation(config: JobConfig) -> None:
    """Refuses sets that are named twice, unknown keys in them, and values that cannot work."""
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
