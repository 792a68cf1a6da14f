# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The summary that a run leaves at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.rollout.drops import DROP_KINDS
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.files import write_whole

_WAITS = (
    *("time/wait_data_fraction", "rollout/wait_rewards_fraction", "rollout/wait_episodes_fraction"),
    *("rollout/wait_trainer_fraction", "rollout/idle_fraction"),
)


@dataclass(frozen=True)
class RunOutcome:
    step: int
    seconds: float  # of this process's part of the run
    server_version: int  # the lowest that a server reports, or -1 if none answers
    weight_sync_failures: int
    hf_checkpoint: Path


def summarize(
    outcome: RunOutcome, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    kl = "teacher/reverse_kl"
    taught = {"first10": steps[:10], "last10": steps[-10:]} if any(kl in s for s in steps) else {}
    dropped = [(k.words, sum(numbers_of(steps, k.metric))) for k in DROP_KINDS.values()]
    return {
        "steps": outcome.step,
        "seconds": round(outcome.seconds, 1),
        "reward_first10": mean_over(steps[:10], "reward/mean"),
        "reward_last10": mean_over(steps[-10:], "reward/mean"),
        **{f"teacher_kl_{k}": mean_over(of, kl) for k, of in taught.items()},
        "heldout_before": mean_over(evaluations[:1], "evaluation/score"),
        "heldout_after": mean_over(evaluations[-1:], "evaluation/score"),
        "max_staleness_steps": max(numbers_of(steps, "staleness/max_steps"), default=0),
        "waits": {metric: mean_over(steps, metric) for metric in _WAITS},
        "dropped": {words: int(number) for words, number in dropped if number},
        "equal_groups_fraction": mean_over(steps, "reward/equal_groups_fraction"),
        "mismatch_kl_mean": mean_over(steps, "mismatch/kl"),
        "policy_version": outcome.step,
        "server_version": outcome.server_version,
        "weight_sync_failures": outcome.weight_sync_failures,
        "hf_checkpoint": str(outcome.hf_checkpoint),
    }


def summarize_supervised(
    outcome: RunOutcome, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "steps": outcome.step,
        "seconds": round(outcome.seconds, 1),
        "epochs": mean_over(steps[-1:], "sft/epoch") or 0.0,
        "loss_first10": mean_over(steps[:10], "loss/total"),
        "loss_last10": mean_over(steps[-10:], "loss/total"),
        "heldout_loss_before": mean_over(evaluations[:1], "evaluation/loss"),
        "heldout_loss_after": mean_over(evaluations[-1:], "evaluation/loss"),
        "hf_checkpoint": str(outcome.hf_checkpoint),
    }


def mean_over(history: list[dict[str, Any]], key: str) -> float | None:
    """Returns the mean of a metric over records; None if no record has a finite number of it."""
    values = numbers_of(history, key)
    return sum(values) / len(values) if values else None


def numbers_of(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the values of a metric that are finite numbers."""
    values = (strict_json.finite(record.get(key)) for record in history)
    return [value for value in values if value is not None]


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    file = folder / "summary.json"
    write_whole(file, (strict_json.dumps(summary, indent=2) + "\n").encode())
    return file
