# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Draws what pipeline ranks do over time, as text and as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.grpo.pipeline.tables.actions import Action, Kind, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: dict[Kind, tuple[str, str]] = {
    "F": ("#7fb3e6", "#1f5fa8"),
    "I": ("#8fd0b8", "#1d7a5b"),
    "W": ("#f4c987", "#c07a14"),
    "B": ("#c3b1e1", "#6a4ea8"),
    "G": ("#c9c9c9", "#7d7d7d"),
}
"""For each kind, the color on a rank's first stage and the color on its later stages."""
_MEANINGS = {
    "F": "forward",
    "I": "input gradient",
    "W": "weight gradient",
    "B": "both gradients",
    "G": "forward of other rows",
}
_NUMBER_POINTS = 7
"""Font size of the microbatches' numbers."""
_DIGIT_WIDTH = 0.0024
"""Share of the picture's width that a digit takes. Passes without room show no number."""


def draw_text(table: Table, simulation: Simulation, width: int = 100) -> str:
    """Draws each rank's passes as letters, in lower case for its later stages; dots are idle time."""
    lines = []
    for rank, actions in enumerate(table.actions):
        line = ["."] * width
        for action in actions:
            begin, end = (
                round(time / simulation.makespan * width)
                for time in (simulation.starts[action], simulation.ends[action])
            )
            letter = action.kind if is_first_stage(table, action) else action.kind.lower()
            line[begin:end] = letter * (end - begin)
        lines.append(f"rank {rank:2}  {''.join(line)}")
    return "\n".join(lines)


def is_first_stage(table: Table, action: Action) -> bool:
    if table.shifts:
        return table.shifts[action.stage] == 0
    return action.stage == table.ranks.index(table.ranks[action.stage])


def draw_picture(pictures: dict[str, tuple[Table, Simulation]], file: Path, unit: str = "") -> Path:
    """Draws schedules below each other over one time axis, in the format of the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [table.num_ranks for table, _ in pictures.values()]
    figure, rows = plt.subplots(
        len(pictures), 1, figsize=(14, 0.8 * len(pictures) + 0.28 * sum(heights)), sharex=True,
        height_ratios=heights, layout="constrained", squeeze=False,
    )  # fmt: skip
    longest = max(simulation.makespan for _, simulation in pictures.values())
    for axes, (title, (table, simulation)) in zip(rows[:, 0], pictures.items(), strict=True):
        _draw_ranks(axes, table, simulation, longest)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_ylim(table.num_ranks - 0.5, -0.5)
        axes.set_yticks(range(table.num_ranks), [f"rank {r}" for r in range(table.num_ranks)])
        axes.set_xlim(0, longest)
    rows[-1, 0].set_xlabel(f"time{f' ({unit})' if unit else ''}")
    used: set[Kind] = {a.kind for table, _ in pictures.values() for a in table.actions[0]}
    kinds: list[Kind] = [kind for kind in _COLORS if kind in used]
    keys = [plt.Rectangle((0, 0), 1, 1, color=_COLORS[kind][0]) for kind in kinds]
    names = [f"{kind}: {_MEANINGS[kind]}" for kind in kinds]
    figure.legend(keys, names, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file, dpi=90)
    plt.close(figure)
    return file


def _draw_ranks(axes: "Axes", table: Table, simulation: Simulation, longest: float) -> None:
    for rank, actions in enumerate(table.actions):
        for action in actions:
            start, end = simulation.starts[action], simulation.ends[action]
            is_dark = not is_first_stage(table, action)
            color = _COLORS[action.kind][is_dark]
            axes.broken_barh([(start, end - start)], (rank - 0.45, 0.9), color=color, lw=0)
            number = str(action.microbatch)
            if (end - start) / longest >= _DIGIT_WIDTH * (len(number) + 1):
                axes.text(
                    (start + end) / 2, rank, number, ha="center", va="center",
                    fontsize=_NUMBER_POINTS, color="white" if is_dark else "black",
                )  # fmt: skip
