# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shows the progress of a run on the console."""

import sys
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows a bar on a terminal, and one line for each step elsewhere.

    Args:
        mode: ``observe.progress``.
        num_steps: Number of steps of the whole run.
    """

    def __init__(self, mode: Literal["auto", "bar", "lines", "none"], num_steps: int) -> None:
        if mode == "auto":
            mode = "bar" if sys.stdout.isatty() else "lines"
        self.mode, self.num_steps = mode, num_steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: RichProgress | None = None
        if mode == "bar":
            bar = self._bar = RichProgress(
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = bar.add_task("waiting for the first rollouts", total=num_steps)
            bar.start()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics of a step that has ended."""
        line = progress_line(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        elif self.mode == "lines":
            self._console.print(f"step {step:>4}/{self.num_steps}  {line}")

    def print(self, message: str) -> None:
        """Prints a message above the bar, unless ``mode`` is ``none``."""
        if self.mode != "none":
            (self._bar.console if self._bar is not None else self._console).print(message)

    def close(self) -> None:
        """Stops the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_line(metrics: dict[str, float]) -> str:
    """Returns reward, staleness, throughput and the state of the weight push in one line."""
    version, server = int(metrics["policy_version"]), metrics.get("weight_sync/server_version")
    if server is None:  # a replayed run has no servers
        sync = f"loss {metrics['loss/total']:+.4f}  grad {metrics['grad_norm']:.3g}"
    else:
        sync = f"sync v{server:.0f} " + ("synced" if server == version else f"-> v{version}")
    return (
        f"reward {metrics['reward/mean']:.3f}  "
        f"stale {metrics['staleness/mean_steps']:.1f}/{metrics['staleness/max_steps']:.0f}  "
        f"{metrics['time/tokens_per_second']:,.0f} tok/s  "
        f"step {metrics['time/step_seconds']:.2f}s  "
        f"kl {metrics['mismatch/kl']:.1e}  " + sync
    )
