# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run leaves behind for people: samples, a summary, a reward curve."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.types import RolloutGroup


class SampleLog:
    """A few rollouts a step, in ``samples.jsonl``.

    Args:
        path: The file.
        per_step: ``observe.samples_per_step``.
        step: Batches already trained on.
    """

    def __init__(self, path: Path, per_step: int, step: int) -> None:
        self._per_step = per_step
        self._log = RunLog(path, step)

    def write(self, step: int, groups: Iterable[RolloutGroup]) -> None:
        """Writes the first rollouts of different groups, so that prompts vary."""
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
        self._log.close()


def summarise(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of ``summary.json`` that the run's records tell."""
    return {
        "reward_first10": mean_over(steps[:10], "reward/mean"),
        "reward_last10": mean_over(steps[-10:], "reward/mean"),
        "heldout_before": evaluations[0]["evaluation/score"] if evaluations else None,
        "heldout_after": evaluations[-1]["evaluation/score"] if evaluations else None,
        "max_staleness_steps": max((s["staleness/max_steps"] for s in steps), default=0),
        "mismatch_kl_mean": mean_over(steps, "mismatch/kl"),
    }


def mean_over(history: list[dict[str, Any]], key: str) -> float | None:
    """Mean of a metric over some steps; None where no step has it."""
    values = [record[key] for record in history if key in record]
    return sum(values) / len(values) if values else None


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Writes ``summary.json``."""
    file = folder / "summary.json"
    file.write_text(json.dumps(summary, indent=2) + "\n")
    return file


def draw_reward_curve(folder: Path, history: list[dict[str, Any]]) -> Path:
    """Draws mean reward and staleness over steps as ``reward_curve.png``."""
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
