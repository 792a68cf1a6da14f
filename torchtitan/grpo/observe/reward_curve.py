# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Draws ``reward_curve.png``."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.evaluation import EvaluationSet, evaluation_sets
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.observe.report import numbers_of
from torchtitan.grpo.rewards.reward_loading import short_names
from torchtitan.grpo.strict_json import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]


def draw_reward_curve(
    folder: Path, steps: Records, evaluations: Records, config: JobConfig
) -> Path:
    """Draws rewards, held-out scores and staleness over steps; returns the path of the picture.

    Args:
        folder: Where ``reward_curve.png`` is written.
        steps: Records of ``metrics.jsonl``.
        evaluations: Records of ``evaluations.jsonl``.
        config: Configuration of the run, for the title and the names of the rewards.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    figure.suptitle(title(config), wrap=True)
    _draw_rewards(top, steps, short_names(config.reward.functions))
    if evaluations:
        _draw_evaluations(top, evaluations, evaluation_sets(config.evaluation))
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


def _draw_evaluations(
    axes: "Axes", evaluations: Records, sets: Mapping[str, EvaluationSet]
) -> None:
    """Draws the score of each set of the configuration."""
    for (name, settings), marker in zip(sets.items(), itertools.cycle("os^vDP*X"), strict=False):
        key = f"evaluation/{name}/score"
        label = f"held out: {settings.function}"
        label += f" ({name})" if len(sets) > 1 else ""
        _draw(axes, evaluations, key, label, f"k{marker}--", linewidth=1)


def title(config: JobConfig) -> str:
    """Returns the run's description, or else the name of its folder."""
    # Upstream's default says nothing about the run.
    is_given = config.job.description != type(config.job)().description
    return config.job.description if is_given else Path(config.job.dump_folder).name


def _draw_rewards(axes: "Axes", steps: Records, names: list[str]) -> None:
    keys = [name for name in names if any(f"reward/{name}" in record for record in steps)]
    # A single component with the weight 1 is the reward itself.
    is_alone = len(keys) == 1 and all(
        record.get(f"reward/{keys[0]}") == record["reward/mean"] for record in steps
    )
    label = keys[0] if is_alone else "reward (weighted sum)"
    _draw(axes, steps, "reward/mean", label, "-", color="C0", linewidth=2)
    if is_alone:
        return
    for index, name in enumerate(keys, start=1):
        _draw(axes, steps, f"reward/{name}", name, "-", color=f"C{index}", linewidth=1, alpha=0.8)


def _draw_staleness(axes: "Axes", steps: Records) -> None:
    """Draws the largest and the mean age, with room above and below the lines."""
    from matplotlib.ticker import MaxNLocator

    _draw(axes, steps, "staleness/max_steps", "largest", "-", color="C3", drawstyle="steps-mid")
    _draw(axes, steps, "staleness/mean_steps", "mean", "-", color="C1", linewidth=1)
    largest = max(numbers_of(steps, "staleness/max_steps"), default=0)
    axes.set_ylim(-0.1 * max(largest, 1), 1.6 * max(largest, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("staleness\n(steps)")
    axes.legend(loc="upper left", fontsize="small", ncols=2)


def _draw(axes: "Axes", records: Records, key: str, label: str, style: str, **kwargs: Any) -> None:
    # What was not a finite number (null) is a gap in the line.
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
