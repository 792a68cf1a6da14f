# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds reward functions by their names in the TOML file, and calls them as TRL does.

Besides the completions and their columns, the functions receive ``ARGUMENTS``, mostly as in TRL.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torchtitan.grpo.rewards.builtin import BUILTIN
from torchtitan.grpo.system import functions
from torchtitan.grpo.workers.channel import unsendable_column

ARGUMENTS = ("trainer_state", "log_extra", "log_metric", "log_unscorable")


@dataclass(frozen=True)
class TrainerState:
    """The training progress, as in TRL. ``global_step``, from 0, is the policy version to be trained next."""

    global_step: int
    max_steps: int


class RewardLog:
    """Collects what reward functions log for one group. Several threads may log."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, list[Any]] = {}
        self.unscorable: set[int] = set()

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what was logged under each name."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value of a metric. A value that is not finite is left out."""
        number = float(value)
        if math.isfinite(number):
            self._metrics[str(name)].append(number)

    def log_unscorable(self, index: int) -> None:
        """Marks a completion whose score is ``None`` because of what the policy wrote in it."""
        self.unscorable.add(range(self._num_completions)[index])

    def log_extra(self, column: str, values: Any) -> None:
        """Sets a column of the logged samples; values that cannot be sent are shown as text."""
        found = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(found) != self._num_completions:
            raise ValueError(
                f"log_extra({column!r}, ...) must get one value for each of "
                f"{self._num_completions} completions, got {len(found)}."
            )
        if unsendable_column({"": found}) is not None:
            found = [repr(value) for value in found]
        self.extra[str(column)] = found


RewardFunction = Callable[..., Any]

JUDGE = "judge"
NAMES = (*BUILTIN, JUDGE)
"""Names of the built-in functions."""

_WHAT = "reward.functions: reward function"


def load_function(path: str, judge: Callable[[], RewardFunction] | None = None) -> RewardFunction:
    """Loads a function by its path (see `functions`) or a built-in's name. Raises ValueError on failure.

    The argument ``judge`` makes the built-in reward of this name, which depends on settings.
    """
    if path == JUDGE and judge is not None:
        return judge()
    return BUILTIN.get(path) or functions.load_function(path, _WHAT, NAMES)


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns names for metrics: each function's own, or its path if two functions share a name."""
    names = [
        path if path in NAMES else functions.split_path(path, _WHAT, NAMES)[1] for path in paths
    ]
    return [
        path if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)
    ]


def call_function(
    function: RewardFunction,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
    more: Mapping[str, Any],
) -> Any:
    """Calls a reward function with those arguments that it accepts. ``more`` holds the ``ARGUMENTS``."""
    available: dict[str, Any] = {**columns, **more, "completion_ids": completion_ids}
    available |= {"prompts": prompts, "completions": completions}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        accepted = {p.name for p in parameters}
        available = {name: value for name, value in available.items() if name in accepted}
    return function(**available)


def missing_arguments(function: RewardFunction, columns: Iterable[str]) -> list[str]:
    given = {*columns, *ARGUMENTS, "prompts", "completions", "completion_ids"}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in kinds and p.default is inspect.Parameter.empty and p.name not in given
    ]


_FOREIGN_ARGUMENTS = {
    **dict.fromkeys(("solution_str", "data_source"), "verl"),
    **dict.fromkeys(("queries", "labels"), "OpenRLHF"),
    **dict.fromkeys(("sample", "args"), "slime"),
    **dict.fromkeys(("completion", "parser", "info", "state"), "verifiers"),
}
"""Arguments by which reward functions of other projects are known."""


def foreign_signature(function: RewardFunction, missing: Iterable[str]) -> str:
    """Returns what to do if a function has another project's signature; empty if it has not."""
    projects = [_FOREIGN_ARGUMENTS[name] for name in missing if name in _FOREIGN_ARGUMENTS]
    if not projects:
        return ""
    wrapped = "[... for each completion]`"
    if projects[0] == "verl":
        name = getattr(function, "__name__", "function")
        wrapped = (
            f"[{name}(None, c, a, None) for c, a in zip(completions, answer)]` (with the names of your "
            "columns; chat completions are lists of messages, whose text is c[-1]['content'])"
        )
    return (
        f"It has the signature of {projects[0]}. Here a function is called once for several "
        "completions, with lists and with the columns by their names, as in TRL. Name one that calls "
        f"yours: `def reward(prompts, completions, answer, **columns): return {wrapped}."
    )
