# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What reaches the console: a bar or lines of steps, and log lines but those that every run has."""

import dataclasses
import io
import json
import logging
import re
import sys
from types import SimpleNamespace

import pytest

from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.observe import console
from torchtitan.grpo.observe.console import Progress, init_console

FIELDS = (
    "reward/mean", "policy/entropy", "staleness/mean_steps", "staleness/max_steps",
    "rollout/completion_tokens_mean", "rollout/tokens_per_second", "time/trained_tokens_per_second",
)  # fmt: skip


def metrics_of(step: int) -> dict[str, float]:
    return dict.fromkeys(FIELDS, 123456.789 * step) | {"rollout/unscored_groups": 3.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_log_lines_stand_above_one_bar_within_80_columns(monkeypatch):
    terminal, erased = Terminal(), "\x1b[2K"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    init_console("info", is_rank_zero=True)
    progress = Progress("auto", 150)
    for step in range(1, 4):
        logging.getLogger().warning(f"log of step {step}")
        progress.update(step, metrics_of(step), "a spike" if step == 2 else "")
    progress.print("a score [0.5]")
    progress.close()
    shown = terminal.getvalue()
    for text in ("log of step 1", "step 2: a spike", "log of step 3", "a score [0.5]"):
        before, after = shown.split(text)
        assert "━" not in before.rpartition(erased)[2], "the bar is erased first"
        assert after.startswith("\n") and "━" in after, "and is drawn again below"
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.rpartition(erased)[2]).splitlines()
    assert len(last) == 3 and all(len(line) <= 80 for line in last)
    assert last[0].startswith("3/150 rew ") and last[1].startswith("dropped: 3 groups unscored")


def test_without_a_terminal_each_step_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    init_console("info", is_rank_zero=True)
    progress = Progress("auto", 150)
    for step in range(1, 4):
        progress.update(step, metrics_of(step), "a spike" if step == 2 else "")
    progress.close()
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert ["  a spike  dropped: " in line for line in lines] == [False, True, False]
    for line in lines:
        for word in ("reward", "entropy", "length", "staleness", "generated", "trained", "waits"):
            assert word in line
        assert "dropped: 3 groups unscored" in line
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        # As upstream's Trainer formats it.
        (f"Building grpo hf with {json.dumps(dataclasses.asdict(DecoderArgs()), indent=2)}", False),
        (f"Building a bwith {json.dumps({'dim': 1}, indent=2)}", False),
        ("Error running lspci: no such file", False),
        ("Model grpo hf size: 471,104 total parameters", True),
        ("Building device mesh with parallelism: pp=1, dp_replicate=1", True),
        ("Training with {rows} rows", True),
    ],
)
def test_what_every_run_would_print_is_left_out(message, is_shown, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    init_console("info", is_rank_zero=True)
    root.info(message)
    assert (message in capsys.readouterr().out) is is_shown


def test_a_wait_is_a_bar_below_that_of_the_steps_until_its_step_is_there(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    progress = Progress("auto", 150)
    assert progress._bar is not None
    progress.wait("start: servers get ready, 3 s", 0, 0)
    progress.wait("step 1: 3 of 8 completions, 99 tokens, 12 tokens/s", 3, 8)
    progress.wait("evaluation at step 0: 1 of 4 completions", 1, 4)
    progress.wait("step 1: 5 of 8 completions, 120 tokens, 12 tokens/s", 5, 8)
    lines = {task.description: (task.completed, task.total) for task in progress._bar.tasks}
    assert lines == {
        "": (0, 150),
        "start: servers get ready, 3 s": (0, None),
        "step 1: 5 of 8 completions, 120 tokens, 12 tokens/s": (5, 8),
        "evaluation at step 0: 1 of 4 completions": (1, 4),
    }
    progress._bar.refresh()
    progress.update(1, metrics_of(1))
    assert [task.description for task in progress._bar.tasks] == [""]
    progress.close()
    assert "5 of 8 completions" in terminal.getvalue()


def test_a_wait_is_a_line_every_30_seconds(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress("lines", 150)
    for second in range(0, 100, 2):
        now = float(second)
        if second == 50:
            progress.update(1, metrics_of(1))
        progress.wait(f"step 1: at {second} s", 1, 2)
    silent = Progress("none", 150)
    now += 1000
    silent.wait("step 1: not shown", 1, 2)
    shown = [line for line in capsys.readouterr().out.splitlines() if "at " in line]
    assert shown == ["step 1: at 30 s", "step 1: at 80 s"]
