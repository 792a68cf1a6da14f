# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The bar on a pseudo-terminal of 80 columns, and what else reaches the console."""

import dataclasses
import fcntl
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.observe.console import init_console

COLUMNS = 80

PROGRAM = """
import logging, sys
from torchtitan.grpo.observe.console import Progress, init_console
init_console("info", is_rank_zero=True)

def metrics(size):
    return {
        "reward/mean": -size, "policy/entropy": size, "staleness/mean_steps": size,
        "rollout/completion_tokens_mean": size, "staleness/max_steps": size,
        "rollout/tokens_per_second": size, "time/trained_tokens_per_second": size,
        "rollout/unscored_groups": 3.0, "rollout/failed_requests": 123456.0,
        "rollout/expired_groups": 99999.0, "rollout/cut_rollouts": 99999.0,
    }

progress = Progress("auto", 150)
for step in range(1, 31):
    if step % 10 == 0:
        logging.getLogger().warning(f"log of step {step}")
        print(f"print of step {step}", file=sys.stderr)
    progress.update(step, metrics(123456.789 * step))
progress.print("a held-out score [0.5]")
progress.close()
logging.getLogger().warning("log after the end")
"""


def run_on_a_terminal(program: str) -> str:
    """Runs a program on a terminal of 80 columns; returns everything that was written to it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=follower, stdout=follower, stderr=follower,
        env=environment | {"TERM": "xterm-256color"}, close_fds=True,
    )  # fmt: skip
    os.close(follower)
    written = b""
    try:
        while chunk := os.read(leader, 65536):
            written += chunk
    except OSError:  # Linux reports the end of a terminal in this way
        pass
    finally:
        os.close(leader)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def screen_of(written: str) -> list[str]:
    """Returns the lines of a terminal, with what was scrolled out of it, after all was written.

    The control sequences are those that the bar uses; any other one fails the test.
    """
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\x1b[2K":
            rows[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row -= int(token[2:-1] or 1)
            assert row >= 0
        elif re.fullmatch(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", token):
            pass  # colours, and the cursor
        else:
            assert not token.startswith("\x1b"), repr(token)
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
            assert column <= COLUMNS or "log of" in token, f"wider than the terminal: {token}"
    return [line.rstrip() for line in rows]


def test_the_bar_holds_in_80_columns_and_log_lines_stand_above_it():
    rows = screen_of(run_on_a_terminal(PROGRAM))
    text = "\n".join(rows)
    for step in (10, 20, 30):
        assert sum(f"log of step {step}" in row for row in rows) == 1, text
        assert sum(f"print of step {step}" in row for row in rows) == 1, text
    assert "a held-out score [0.5]" in rows
    # One bar is left at the end, with the last step and its counts above it.
    assert len([row for row in rows if "━" in row]) == 1, text
    steps = [row for row in rows if " rew " in row]
    assert len(steps) == 1, text
    assert steps[0].startswith("30/150 rew ") and "trn waits" in steps[0]
    (counts,) = [row for row in rows if row.startswith("dropped: ")]
    assert len(counts) <= COLUMNS
    last = [row for row in rows if row][-1]
    assert last.endswith("log after the end")


def test_without_a_terminal_each_step_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    exec(PROGRAM, {})
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert len(lines) == 30
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
