# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Files that a run leaves for people: samples, a summary and a reward curve."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.types import RolloutGroup


class SampleLog:
    """Writes a few rollouts of each step to ``samples.jsonl``.

    Args:
        path: The file.
        per_step: ``observe.samples_per_step``.
        step: Number of batches that the run has been trained on so far.
    """

    def __init__(self, path: Path, per_step: int, step: int) -> None:
        self._per_step = per_step
        self._log = RunLog(path, step)

    def write(self, step: int, groups: Iterable[RolloutGroup]) -> None:
        """Writes the first rollout of each of the first groups, so that the prompts differ."""
        for group in list(groups)[: self._per_step]:
            rollout = group.rollouts[0]
            self._log.add(
                {
                    "step": step,
                    "group_id": group.group_id,
                    "prompt": group.prompt_text,
                    "completion": rollout.completion,
                    "reward": rollout.reward,
                    "reward_components": rollout.reward_components,
                    "finish_reason": rollout.finish_reason,
                    "versions": [[s.version, s.start, s.end] for s in rollout.segments],
                    "server": group.server_url,
                }
            )

    def close(self) -> None:
        """Closes the file."""
        self._log.close()


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


def summarise(
    outcome: RunOutcome, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of ``summary.json``.

    Args:
        outcome: How the run ended.
        steps: Records of ``metrics.jsonl``.
        evaluations: Records of ``evaluations.jsonl``.
    """
    return {
        "steps": outcome.step,
        "seconds": round(outcome.seconds, 1),
        "reward_first10": mean_over(steps[:10], "reward/mean"),
        "reward_last10": mean_over(steps[-10:], "reward/mean"),
        "heldout_before": evaluations[0]["evaluation/score"] if evaluations else None,
        "heldout_after": evaluations[-1]["evaluation/score"] if evaluations else None,
        "max_staleness_steps": max((s["staleness/max_steps"] for s in steps), default=0),
        "mismatch_kl_mean": mean_over(steps, "mismatch/kl"),
        "policy_version": outcome.step,
        "server_version": outcome.server_version,
        "weight_sync_failures": outcome.weight_sync_failures,
        "hf_checkpoint": str(outcome.hf_checkpoint),
    }


def mean_over(history: list[dict[str, Any]], key: str) -> float | None:
    """Returns the mean of a metric over the records that have it, or None if none has it."""
    values = [record[key] for record in history if key in record]
    return sum(values) / len(values) if values else None


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Writes ``summary.json`` and returns its path."""
    file = folder / "summary.json"
    file.write_text(json.dumps(summary, indent=2) + "\n")
    return file


def draw_reward_curve(folder: Path, history: list[dict[str, Any]]) -> Path:
    """Draws mean reward and staleness over steps as ``reward_curve.png``; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] for record in history]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(steps, [record["reward/mean"] for record in history], label="mean reward")
    top.set_ylabel("reward")
    top.grid(alpha=0.3)
    top.legend(loc="lower right")
    bottom.step(steps, [record["staleness/max_steps"] for record in history], where="mid")
    bottom.set_ylabel("staleness (max, steps)")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    file = folder / "reward_curve.png"
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
