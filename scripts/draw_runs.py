# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Draws the rewards and held-out scores of several runs into one picture, such as one for each seed.

    python scripts/draw_runs.py outputs/seed0 outputs/seed1 --title "..." --output curve.png

It reads metrics.jsonl and evaluations.jsonl of each folder. A run's metric, by default its mean reward, is shown as a
running mean. Each run has a color, and each held-out set a style of line.
"""

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

WINDOW = 5
"""Number of steps over which the metric is averaged."""
STYLES = ("o-", "s--", "^:", "d-.")


def read(file: Path, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps of a JSONL file that have the metric ``name``, and its values."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in rows], [row[name] for row in rows]


def draw(folders: list[Path], metric: str, title: str, output: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, folder in enumerate(folders):
        color = f"C{number}"
        steps, values = read(folder / "metrics.jsonl", metric)
        means = [np.mean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]
        axes.plot(steps, means, color=color, linewidth=1, alpha=0.6)
        evaluations = folder / "evaluations.jsonl"
        for name, style in zip(_set_names(evaluations), itertools.cycle(STYLES)):
            scores = read(evaluations, f"evaluation/{name}/score")
            axes.plot(*scores, style, color=color, markersize=4, label=f"{folder.name}: {name}")
    axes.set(xlabel="step", ylabel="score", title=title)
    if axes.dataLim.ymin >= 0 and axes.dataLim.ymax <= 1:
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    meaning = f"points: held out; thin lines: {metric}, mean of {WINDOW} steps"
    figure.legend(title=meaning, fontsize=8, ncols=3, loc="outside lower center", frameon=False)
    figure.savefig(output, dpi=120)


def _set_names(file: Path) -> list[str]:
    if not file.exists():
        return []  # a run without [evaluation]
    first = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    return [key.split("/")[1] for key in first if key.count("/") == 2 and key.endswith("/score")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw several runs into one picture.")
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--metric", default="reward/mean", help="one of metrics.jsonl")
    parser.add_argument("--title", default="")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    draw(options.folders, options.metric, options.title, options.output)


if __name__ == "__main__":
    main()
