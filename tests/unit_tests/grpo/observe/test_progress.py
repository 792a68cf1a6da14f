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
from typing import Any

import pytest

from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.observe import console
from torchtitan.grpo.observe.console import Progress, init_console
from torchtitan.grpo.observe.events import events
from torchtitan.grpo.observe.metrics_processor import GRPOMetricsProcessor, Phases

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
    for server in ("a", "b"):  # the last line of a server's log, which is no markup
        progress.wait(f"{server}: reads [/model]")
    assert progress._bar is not None
    progress._bar.refresh()  # which a thread would do ten times a second
    for step in range(1, 4):
        logging.getLogger().warning(f"log of step {step}")
        progress.update(step, metrics_of(step), "a spike" if step == 2 else "")
    progress.print("a score [0.5]")
    progress.close()
    shown = terminal.getvalue()
    assert "a: reads [/model]" in shown and "b: reads [/model]" in shown
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
    progress.wait("waiting for servers: 1 of 4 ready", 1, 4)
    progress.wait("step 1: 3 of 8 completions, 99 tokens, 12 tokens/s", 3, 8)
    progress.wait("evaluation at step 0: 1 of 4 completions", 1, 4)
    progress.wait("step 1: 5 of 8 completions, 120 tokens, 12 tokens/s", 5, 8)
    lines = {task.description: (task.completed, task.total) for task in progress._bar.tasks}
    assert lines == {
        "": (0, 150),
        "waiting for servers: 1 of 4 ready": (1, 4),
        "step 1: 5 of 8 completions, 120 tokens, 12 tokens/s": (5, 8),
        "evaluation at step 0: 1 of 4 completions": (1, 4),
    }
    progress._bar.refresh()
    progress.update(1, metrics_of(1))
    assert [task.description for task in progress._bar.tasks] == [""]
    progress.close()
    assert "5 of 8 completions" in terminal.getvalue()


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_wait_is_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress("lines", 150)
    for second in range(0, 40, 2):
        clock.now = float(second)
        if second == 16:
            progress.update(1, metrics_of(1))
        progress.wait(f"step 1: at {second} s", 1, 2)
    silent = Progress("none", 150)
    for second in range(40, 60):
        clock.now = float(second)
        silent.wait("step 1: at no time", 1, 2)
    shown = [line for line in capsys.readouterr().out.splitlines() if "at " in line]
    assert shown == ["step 1, 10 s: at 10 s", "step 1, 26 s: at 26 s", "step 1, 36 s: at 36 s"]


def test_waits_shorter_than_ten_seconds_are_not_told(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress("lines", 150)
    for second in range(60):  # the same wait again after a pause begins anew
        clock.now = float(second)
        if second % 15 < 9:
            progress.wait(f"push of version {second // 30}: 1 of 2 servers have it", 1, 2)
    assert capsys.readouterr().out == ""


def test_a_phase_is_told_only_while_no_other_wait_is(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress("lines", 150)
    for second in range(50):
        clock.now = float(second)
        progress.wait("starting rollouts", only_alone=True)
        if 11 <= second < 25:
            progress.wait("waiting for servers: 0 of 1 ready", 0, 1)
    assert capsys.readouterr().out.splitlines() == [
        "starting rollouts, 10 s",
        "waiting for servers, 10 s: 0 of 1 ready",
        "starting rollouts, 10 s",
    ]


def test_a_bar_goes_when_its_wait_is_over(monkeypatch):
    terminal, clock = Terminal(), Clock(monkeypatch)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stdout", terminal)
    progress = Progress("bar", 150)
    assert progress._bar is not None
    progress.wait("waiting for servers: 1 of 4 ready", 1, 4)
    clock.now = 6.0
    progress.wait("push of version 0: 1 of 2 servers have it", 1, 2)
    shown = [task.description for task in progress._bar.tasks]
    assert shown == ["", "push of version 0: 1 of 2 servers have it"]
    progress.close()
    progress.wait("push of version 0: 1 of 2 servers have it", 1, 2)  # by a thread that ends later


def test_a_push_names_one_of_the_servers_that_lack_its_version():
    shown: list[tuple[str, int, int]] = []
    processor: Any = SimpleNamespace(wait=lambda *wait: shown.append(wait))
    states = {"a": {"state": "ready", "version": 0}, "b": {"state": "joining", "version": -1}}
    GRPOMetricsProcessor.wait_push(processor, 0, states)
    states = {"a": states["a"], "c": {"state": "asleep", "version": -1}}
    GRPOMetricsProcessor.wait_push(processor, 0, states)
    assert shown == [
        ("push of version 0: 1 of 2 servers have it; b is joining", 1, 2),
        ("push of version 0: 1 of 1 servers have it", 1, 1),
    ]


def test_phases_are_told_until_a_step_is_complete_and_in_evaluations():
    shown: list[str] = []
    phases = Phases(100.0)
    seconds = iter(
        [
            lambda: phases.enter("loading weights"),
            lambda: phases.enter("forward and backward"),
            lambda: (phases.complete(1), phases.enter("optimizer step")),
            lambda: phases.enter("evaluating"),
        ]
    )

    def wait(_: float) -> bool:
        act = next(seconds, None)
        if act is not None:
            act()
        return act is None

    processor: Any = SimpleNamespace(
        monitor=SimpleNamespace(phases=phases),
        _ended=SimpleNamespace(wait=wait),
        _config=SimpleNamespace(compile=SimpleNamespace(enable=True)),
        _progress=SimpleNamespace(wait=lambda line, *, only_alone: shown.append(line)),
    )
    GRPOMetricsProcessor._show_phases(processor)
    compiling = "forward and backward: the first step compiles the model"
    assert shown == ["loading weights", compiling, "evaluating"]


def test_events_are_what_rank_0_shows(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(events, "_waiting", [])
    init_console("info", is_rank_zero=False)
    root.warning("of rank 1")
    init_console("info", is_rank_zero=True)
    for text in ("Error running lspci: no such file", "shown"):
        root.warning(text)
    root.info("no event")
    init_console("error", is_rank_zero=True)
    root.warning("hidden by observe.log_level")
    assert [text for _, _, text in events._waiting] == ["shown"]
