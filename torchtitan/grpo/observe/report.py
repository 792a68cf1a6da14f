# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The summary and the picture that a run leaves at its end."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.rewards.reward_loading import short_names
from torchtitan.grpo.rollout.drops import DROP_KINDS
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.system.strict_json import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


Records = Sequence[Mapping[str, Any]]


def draw_reward_curve(
    folder: Path, steps: Records, evaluations: Records, config: JobConfig
) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    figure.suptitle(title(config), wrap=True)
    components = short_names(reward_functions(config))
    _draw_rewards(top, steps, [*components, *(f"file/{name}" for name in config.environments)])
    if evaluations:
        sets = evaluation_sets(config.evaluation)
        for (name, settings), marker in zip(
            sets.items(), itertools.cycle("os^vDP*X"), strict=False
        ):
            label = f"held out: {settings.function}" + (f" ({name})" if len(sets) > 1 else "")
            key = f"evaluation/{name}/score"
            _draw(top, evaluations, key, label, f"k{marker}--", linewidth=1)
    top.set_ylabel("reward, score")
    top.legend(loc="best", fontsize="small")
    _draw_staleness(bottom, steps)
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    file = folder / "reward_curve.png"
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


def title(config: JobConfig) -> str:
    # Upstream's default says nothing about the run.
    is_given = config.job.description != type(config.job)().description
    return config.job.description if is_given else Path(config.job.dump_folder).name


def _draw_rewards(axes: "Axes", steps: Records, names: list[str]) -> None:
    keys = [name for name in names if any(f"reward/{name}" in record for record in steps)]
    # A single component with the weight 1 is the reward itself.
    is_alone = len(keys) == 1 and all(
        record.get(f"reward/{keys[0]}") == record.get("reward/mean") for record in steps
    )
    label = keys[0] if is_alone else "reward (weighted sum)"
    _draw(axes, steps, "reward/mean", label, "-", color="C0", linewidth=2)
    if is_alone:
        return
    for index, name in enumerate(keys, start=1):
        label = name.removeprefix("file/")
        _draw(axes, steps, f"reward/{name}", label, "-", color=f"C{index}", linewidth=1, alpha=0.8)


def _draw_staleness(axes: "Axes", steps: Records) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw(axes, steps, "staleness/max_steps", "largest", "-", color="C3", drawstyle="steps-mid")
    _draw(axes, steps, "staleness/mean_steps", "mean", "-", color="C1", linewidth=1)
    largest = max(numbers_of(steps, "staleness/max_steps"), default=0)
    axes.set_ylim(-0.1 * max(largest, 1), 1.6 * max(largest, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("staleness\n(steps)")
    axes.legend(loc="upper left", fontsize="small", ncols=2)


def _draw(axes: "Axes", records: Records, key: str, label: str, style: str, **kwargs: Any) -> None:
    # A number that was not finite (null) is a gap in the line.
    points = [(record["step"], finite(record[key])) for record in records if key in record]
    # A single step would be a line without length.
    marker = {"marker": "o", "markersize": 3} if len(points) == 1 and "o" not in style else {}
    axes.plot(
        [x for x, _ in points],
        [math.nan if y is None else y for _, y in points],
        style,
        label=label,
        **marker,
        **kwargs,
    )
