# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shows the progress of a run, and filters the messages of torchtitan and torch."""

import logging
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from torchtitan.grpo.observe.step_line import WIDE_COLUMNS, dropped, long_line, short_line
from torchtitan.grpo.system.logs import init_logger, logger

# Harmless messages that every run would print, some of them on every rank or on a CPU.
_NOISE = (
    "with {\n",  # all arguments of the model, one in a line
    "Error running lspci",
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",  # set by torchrun, overridden by upstream
    "Pipeline Parallel loss is not visible",  # it is: sums reach rank 0 from every stage
    "Mixed precision training with TP or PP",  # see models/parallelize.py
)
_NOISY_WARNINGS = (
    "DTensor random operators may not have complete support on cpu",
    # Upstream makes an autocast that is never entered.
    "In CPU autocast, but the target dtype is not supported",
    "DTensor manual_seed.. may not have complete support on cpu",
)
_TELL_SECONDS = 30.0


def init_console(level: str, *, is_rank_zero: bool) -> None:
    """Sets up torchtitan's logger. Ranks other than 0 report only warnings and errors."""
    init_logger()
    logger.setLevel(level.upper() if is_rank_zero else "WARNING")
    for handler in logger.handlers:
        handler.addFilter(lambda record: not any(noise in record.getMessage() for noise in _NOISE))
    # Matplotlib logs that it builds its font cache, once on each machine.
    logging.getLogger("matplotlib").setLevel("WARNING")
    for message in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


class Progress:
    """Shows a bar below the line of the last step on a terminal, and only the lines elsewhere.

    Log messages go through the bar's console: others would stand in the middle of it.
    """

    def __init__(self, mode: Literal["auto", "bar", "lines", "none"], num_steps: int) -> None:
        if mode == "auto":
            mode = "bar" if sys.stdout.isatty() else "lines"
        self.mode, self.num_steps = mode, num_steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: _Bar | None = None
        self._parts: dict[str, TaskID] = {}  # bars of what is waited for
        self._told = time.monotonic()
        self._rerouted: list[tuple[logging.StreamHandler, TextIO]] = []
        if mode == "bar":
            self._bar = _Bar(
                MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(),
                TextColumn("{task.description}"), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=num_steps, visible=num_steps > 0)
            terminal = sys.stdout, sys.stderr
            self._bar.start()
            # The log's handlers go to the streams that the bar has put in place of these.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in terminal:
                    self._rerouted.append((handler, handler.stream))
                    handler.setStream(sys.stdout if handler.stream is terminal[0] else sys.stderr)

    def update(self, step: int, metrics: dict[str, float], note: str = "") -> None:
        """Shows a step. A ``note`` stays above the bar, when other steps have replaced this one."""
        is_wide = not self._console.is_terminal or self._console.width >= WIDE_COLUMNS
        line = (long_line if is_wide else short_line)(step, self.num_steps, metrics)
        left_out = dropped(metrics)
        self._told = time.monotonic()
        if self._bar is not None:
            if note:
                self.print(f"step {step}: {note}")
            self._bar.lines = [line, left_out] if left_out else [line]
            self._bar.update(self._task, completed=step)
            while self._parts:
                self._bar.remove_task(self._parts.popitem()[1])
        elif self.mode == "lines":
            space = "  " if is_wide else "\n  "
            parts = space.join(filter(None, (line, note, left_out)))
            self._console.print(parts, markup=False)

    def wait(self, line: str, done: int, wanted: int) -> None:
        """Shows how far a batch or an evaluation is: a bar, or a line every 30 s."""
        if self._bar is not None:
            if (what := line.partition(":")[0]) not in self._parts:
                self._parts[what] = self._bar.add_task("", total=None)
            part, total = self._parts[what], wanted or None
            self._bar.update(part, completed=done, total=total, description=line)
        elif self.mode == "lines" and time.monotonic() - self._told >= _TELL_SECONDS:
            self._told = time.monotonic()
            self.print(line)

    def print(self, message: str, *, always: bool = False) -> None:
        """Prints a message above the bar, unless ``mode`` is ``none``; ``always`` even then."""
        if always or self.mode != "none":
            self._console.print(message, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for handler, stream in self._rerouted:
            handler.setStream(stream)
        self._rerouted = []


class _Bar(RichProgress):
    """A bar with lines above it, each cut off at the terminal's width."""

    lines: Iterable[str] = ("waiting for the first step",)

    def get_renderables(self) -> Iterable[RenderableType]:
        for line in self.lines:
            yield Text(line, no_wrap=True, overflow="ellipsis")
        yield from super().get_renderables()
