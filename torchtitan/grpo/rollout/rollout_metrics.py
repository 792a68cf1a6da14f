# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the metrics that the rollout process reports with each batch."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from torchtitan.grpo.types import Rollout, RolloutGroup

_TOKENS = "rollout/tokens_per_second"


class RolloutMetrics:
    """Computes a batch's metrics. ``file_names`` are short names of prompt files, none for a single file."""

    def __init__(self, file_names: Sequence[str] = ()) -> None:
        self._no_groups = {f"rollout/file/{name}/fraction": 0.0 for name in file_names}
        self._last = Counter[str]()
        self._last_time = time.monotonic()

    def of_batch(
        self, groups: Sequence[RolloutGroup], num_tokens: int, counts: Mapping[str, int]
    ) -> dict[str, float]:
        """Returns the metrics of a batch. ``num_tokens`` and ``counts`` are totals of the run so far."""
        now, totals = time.monotonic(), Counter({**counts, _TOKENS: num_tokens})
        elapsed = max(now - self._last_time, 1e-9)
        new = {name: float(total - self._last[name]) for name, total in totals.items()}
        self._last, self._last_time = totals, now
        new[_TOKENS] /= elapsed
        return self._no_groups | group_metrics(groups) | new


def with_environment(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Inserts an environment's name, unless it is empty, into the names of the environment's metrics.

    Example: ``environment/step_seconds`` of ``game`` is ``environment/game/step_seconds``.
    """
    if not name:
        return dict(metrics)
    parts = ((*key.partition("/"), value) for key, value in metrics.items())
    return {f"{family}/{name}/{rest}": value for family, _, rest, value in parts}


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_written for rollout in rollouts]
    is_full = [rollout.finish_reason == "length" for rollout in rollouts]
    return (
        _reward_metrics(rollouts)
        | _logged_metrics(groups)
        | _teacher_metrics(rollouts)
        | _file_metrics(groups)
        | {
            "rollout/completion_tokens_mean": float(np.mean(lengths)),
            "rollout/completion_tokens_min": float(min(lengths)),
            "rollout/completion_tokens_max": float(max(lengths)),
            "rollout/length_fraction": float(np.mean(is_full)),
        }
    )


def _file_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    by_file: dict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        if group.file:
            by_file[group.file].append(group)
    metrics = {}
    for name, of_file in by_file.items():
        rollouts = [rollout for group in of_file for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        lengths = [rollout.num_written for rollout in rollouts]
        metrics |= {
            f"reward/file/{name}": float(np.mean(rewards)),
            f"rollout/file/{name}/completion_tokens_mean": float(np.mean(lengths)),
            f"rollout/file/{name}/fraction": len(of_file) / len(groups),
        }
    return metrics


def _logged_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The mean of each metric that reward functions logged, over those groups that have the metric."""
    logged: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, value in group.rollouts[0].reward_metrics.items():
            logged[name].append(value)
    return {f"reward/logged/{name}": float(np.mean(values)) for name, values in logged.items()}


def _teacher_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    total, num_tokens = 0.0, 0
    for rollout in rollouts:
        if rollout.teacher_logprobs is not None:
            gap = rollout.logprobs - rollout.teacher_logprobs
            total += float(gap.sum() if rollout.sampled is None else gap[rollout.sampled].sum())
            num_tokens += rollout.num_trained
    return {"teacher/reverse_kl": total / num_tokens} if num_tokens else {}


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    components: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward_components.items():
            components[name].append(value)
    means = {f"reward/{name}": float(np.mean(values)) for name, values in components.items()}
    return means | {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
