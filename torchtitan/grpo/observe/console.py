# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shows the progress of a run, and filters the messages of torchtitan and torch.

The line of a step has a short and a long form. The short form always fits into 80 columns, because
each number has a greatest width:

    rew 0.512 ent 0.51 len 11.2 age 0.75 gen/trn 12k/9.9k trn waits 45%

``gen/trn`` are generated and trained tokens per second. ``trn waits`` is the share of the step
in which the trainer waits for rollouts. If rollouts wait for the trainer for a larger share,
the field shows that share, as ``gen waits``. If the trainer mostly waits for rewards, the field begins
with ``rewards``; if for environments and agents, with ``episodes``. The long form also shows these shares,
some times in seconds, and the share of time for which the devices were lent to servers.
"""

import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from torchtitan.grpo.observe.events import events
from torchtitan.grpo.rollout.drops import DROP_KINDS
from torchtitan.grpo.system.logs import init_logger, logger

WIDE_COLUMNS = 150
"""Number of columns from which on a terminal shows the long form."""

_DROPPED = tuple((kind.metric, kind.words) for kind in DROP_KINDS.values())
"""Counts of a step that are shown if they are not zero."""
_CAUSES = (
    ("rollout/wait_rewards_fraction", "rewards"),
    ("rollout/wait_episodes_fraction", "episodes"),
)
_TIMES = {"scoring_seconds": "scoring", "judge_seconds": "judge", "own_seconds": ""}
"""Last parts of metrics, and what the line calls them if it is not what is before."""


def short_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns a line of at most 79 characters."""
    return " ".join(short for short, _ in _fields(step, num_steps, metrics) if short)


def long_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    return "  ".join(long for _, long in _fields(step, num_steps, metrics) if long)


def _fields(step: int, num_steps: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields each field in its short and its long form. A form is empty where its line omits the field."""

    def field(short: str, long: str, key: str, width: int, wide: int) -> tuple[str, str]:
        value = metrics[key]
        return f"{short} {number(value, width)}", f"{long} {number(value, wide)}"

    where = f"{step}/{num_steps}"
    yield where if len(where) <= 9 else str(step), f"step {step:>{len(str(num_steps))}}/{num_steps}"
    speed = metrics["time/trained_tokens_per_second"]
    if "reward/mean" not in metrics:  # supervised
        yield field("loss", "loss", "loss/total", 5, 7)
        yield field("epoch", "epoch", "sft/epoch", 5, 7)
        yield f"trained {number(speed, 5)} tok/s", f"trained {number(speed, 7)} tok/s"
        return
    reward = field("rew", "reward", "reward/mean", 6, 6)
    if "teacher/reverse_kl" in metrics:
        divergence = field("kl", "teacher kl", "teacher/reverse_kl", 6, 6)
        is_alone = metrics["reward/std"] == 0
        yield ("", reward[1]) if is_alone else reward
        yield (divergence[0] if is_alone else "", divergence[1])
    else:
        yield reward
    if "policy/entropy" in metrics:
        yield field("ent", "entropy", "policy/entropy", 4, 5)
    yield field("len", "length", "rollout/completion_tokens_mean", 4, 5)
    short, long = field("age", "staleness", "staleness/mean_steps", 4, 4)
    yield short, f"{long} (max {metrics['staleness/max_steps']:.0f})"
    generated = metrics.get("rollout/tokens_per_second")
    if generated is None:  # a replayed run has no servers
        yield f"trn {number(speed, 4)}/s", f"trained {number(speed, 5)} tok/s"
        return
    causes = [(metrics.get(key, 0.0), name) for key, name in _CAUSES]
    most, cause = max(causes)
    share = metrics.get("time/wait_data_fraction", 0.0)
    short, waits = (cause if 2 * most > share else "trn waits"), "trainer waits"
    if (of_rollouts := metrics.get("rollout/wait_trainer_fraction", 0.0)) > share:
        short, waits, share = "gen waits", "rollouts wait", of_rollouts
    yield (
        f"gen/trn {number(generated, 4)}/{number(speed, 4)}",
        f"generated {number(generated, 5)} tok/s  trained {number(speed, 5)} tok/s",
    )
    yield f"{short} {min(round(100 * share), 99)}%", f"{waits} {100 * share:.0f}%"
    for part, name in causes:
        yield "", f"for {name} {100 * part:.0f}%" if part >= 0.005 else ""
    for key, value in metrics.items():
        what, _, unit = key.rpartition("/")
        if unit in _TIMES and value >= 0.05:
            yield "", f"{_TIMES[unit] or what} {number(value, 5)} s"
    if "lend/lent_seconds" in metrics:
        lent = metrics["lend/lent_seconds"] / metrics["time/step_seconds"]
        yield "", f"devices lent {100 * lent:.0f}%"


def dropped(metrics: Mapping[str, float]) -> str:
    """Describes the groups and rollouts left out since the last step; empty if there are none."""
    counts = [(metrics.get(key, 0.0), words) for key, words in _DROPPED]
    found = [f"{count:.0f} {words}" for count, words in counts if count]
    return f"dropped: {', '.join(found)}" if found else ""


def number(value: float, width: int) -> str:
    """Writes a number in at most ``width`` characters. Numbers need a width of 4, and negative ones 5.

    With a width of 4, 0.5123 is ``0.51``, and 12345 is ``12k``.
    """
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.5 * 10.0 ** -min(width - 2, 3):
        return _scientific(value)
    for factor, suffix in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        for decimals in (3, 2, 1, 0) if factor == 1 else (1, 0):
            text = f"{value / factor:.{decimals}f}{suffix}"
            if len(text) <= width:
                return text
    return _scientific(value)


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


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
_TELL_SECONDS = 10.0
_OVER_SECONDS = 5.0
"""A wait that nobody has reported for this long is over. Reports come every second or two."""


def init_console(level: str, *, is_rank_zero: bool) -> None:
    """Sets up torchtitan's logger. Ranks other than 0 report only warnings and errors."""
    init_logger()
    logger.setLevel(level.upper() if is_rank_zero else "WARNING")
    if is_rank_zero:
        logger.addHandler(events)
    for handler in logger.handlers:
        handler.addFilter(lambda record: not any(noise in record.getMessage() for noise in _NOISE))
    # Matplotlib logs that it builds its font cache, once on each machine.
    logging.getLogger("matplotlib").setLevel("WARNING")
    for message in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


class Progress:
    """Shows the latest step's line above a progress bar on a terminal, and only lines elsewhere.

    Log messages go through the bar's console, because they would otherwise be printed into the bar.
    """

    def __init__(self, mode: Literal["auto", "bar", "lines", "none"], num_steps: int) -> None:
        if mode == "auto":
            mode = "bar" if sys.stdout.isatty() else "lines"
        self.mode, self.num_steps = mode, num_steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: _Bar | None = None
        self._parts: dict[str, TaskID] = {}  # bars of what is waited for
        self._told = time.monotonic()
        self._waits: dict[str, tuple[float, float]] = {}  # when each began, and was reported last
        self._lock = threading.RLock()
        self._rerouted: list[tuple[logging.StreamHandler, TextIO]] = []
        if mode == "bar":
            self._bar = _Bar(
                MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False), console=self._console,
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
        """Shows a step. A ``note`` stays above the bar after other steps have replaced this one."""
        is_wide = not self._console.is_terminal or self._console.width >= WIDE_COLUMNS
        line = (long_line if is_wide else short_line)(step, self.num_steps, metrics)
        left_out = dropped(metrics)
        self._told = time.monotonic()
        if self._bar is not None:
            if note:
                self.print(f"step {step}: {note}")
            self._bar.lines = [line, left_out] if left_out else [line]
            self._bar.update(self._task, completed=step)
            with self._lock:
                for what in list(self._parts):
                    self._remove(what)
        elif self.mode == "lines":
            space = "  " if is_wide else "\n  "
            parts = space.join(filter(None, (line, note, left_out)))
            self._console.print(parts, markup=False)

    def wait(self, line: str, done: int = 0, wanted: int = 0, *, only_alone: bool = False) -> None:
        """Shows what is waited for and how far it is: as a bar, or as a line every ten seconds.

        The part of ``line`` before a colon names the wait. Lines begin when it has lasted ten seconds. With
        ``only_alone``, it is shown only while no other wait is reported. Any thread may call this.
        """
        now, (what, colon, state) = time.monotonic(), line.partition(":")
        with self._lock:
            for old in [
                old for old, (_, last) in self._waits.items() if now - last > _OVER_SECONDS
            ]:
                del self._waits[old]
                self._remove(old)
            if only_alone and self._waits.keys() - {what}:
                return
            begun = self._waits.get(what, (now, now))[0]
            self._waits[what] = begun, now
            if self._bar is not None:
                if what not in self._parts:
                    self._parts[what] = self._bar.add_task("", total=None)
                total = wanted or None
                self._bar.update(self._parts[what], completed=done, total=total, description=line)
            elif self.mode == "lines" and now - max(self._told, begun) >= _TELL_SECONDS:
                self._told = now
                self.print(f"{what}, {now - begun:.0f} s{colon}{state}")

    def _remove(self, what: str) -> None:
        if (part := self._parts.pop(what, None)) is not None and self._bar is not None:
            self._bar.remove_task(part)

    def print(self, message: str, *, always: bool = False) -> None:
        """Prints a message above the bar. With ``mode`` ``none``, prints it only if ``always`` is set."""
        if always or self.mode != "none":
            self._console.print(message, markup=False)

    def close(self) -> None:
        with self._lock:
            self.mode = "none"  # for threads that still report
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
