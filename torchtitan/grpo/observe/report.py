# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The summary that a run leaves at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo import strict_json
from torchtitan.grpo.system.files import write_whole


@dataclass(frozen=True)
class RunOutcome:
    """Describes how a run ended, apart from what the records of its steps tell.

    Attributes:
        step: Number of optimizer steps that the policy has taken.
        seconds: Wall-clock duration of this process's part of the run.
        server_version: Lowest version that a server reports; -1 if none answers.
        weight_sync_failures: Number of pushes to a server that failed.
        hf_checkpoint: Directory of the exported model.
    """

    step: int
    seconds: float
    server_version: int
    weight_sync_failures: int
    hf_checkpoint: Path


def summarize(
    outcome: RunOutcome, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of ``summary.json``.

    Args:
        outcome: How the run ended.
        steps: Records of ``metrics.jsonl``.
        evaluations: Records of ``evaluations.jsonl``.
    """
    taught = {}
    if any("teacher/reverse_kl" in record for record in steps):
        taught = {
            "teacher_kl_first10": mean_over(steps[:10], "teacher/reverse_kl"),
            "teacher_kl_last10": mean_over(steps[-10:], "teacher/reverse_kl"),
        }
    return {
        "steps": outcome.step,
        "seconds": round(outcome.seconds, 1),
        "reward_first10": mean_over(steps[:10], "reward/mean"),
        "reward_last10": mean_over(steps[-10:], "reward/mean"),
        **taught,
        "heldout_before": evaluations[0]["evaluation/score"] if evaluations else None,
        "heldout_after": evaluations[-1]["evaluation/score"] if evaluations else None,
        "max_staleness_steps": max(numbers_of(steps, "staleness/max_steps"), default=0),
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
    """Returns the content of ``summary.json`` for a run that has no rollouts.

    Args:
        outcome: How the run ended.
        steps: Records of ``metrics.jsonl``.
        evaluations: Records of ``evaluations.jsonl``.
    """
    return {
        "steps": outcome.step,
        "seconds": round(outcome.seconds, 1),
        "epochs": steps[-1]["sft/epoch"] if steps else 0.0,
        "loss_first10": mean_over(steps[:10], "loss/total"),
        "loss_last10": mean_over(steps[-10:], "loss/total"),
        "heldout_loss_before": evaluations[0]["evaluation/loss"] if evaluations else None,
        "heldout_loss_after": evaluations[-1]["evaluation/loss"] if evaluations else None,
        "hf_checkpoint": str(outcome.hf_checkpoint),
    }


def mean_over(history: list[dict[str, Any]], key: str) -> float | None:
    """Returns the mean of a metric over the records that have a number of it, or None without one."""
    values = numbers_of(history, key)
    return sum(values) / len(values) if values else None


def numbers_of(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the values of a metric that are finite numbers."""
    values = (strict_json.finite(record.get(key)) for record in history)
    return [value for value in values if value is not None]


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Writes ``summary.json`` and returns its path."""
    file = folder / "summary.json"
    write_whole(file, (strict_json.dumps(summary, indent=2) + "\n").encode())
    return file
