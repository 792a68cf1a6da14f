# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the console and events.jsonl of a whole run say of slow starts and of what goes wrong."""

import re
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
# A server that takes its time before it starts.
PYTHON = """#!/bin/bash
echo "loading shard 3"
sleep {seconds}
exec {python} "$@"
"""
REWARDS = """
import time

def slow(completions, answer, **kwargs):
    time.sleep({seconds})
    return [float(c == a) for c, a in zip(completions, answer)]

def raising(completions, answer, **kwargs):
    if len(completions) > 1 and sum(map(ord, answer[0])) % 2:  # not in the check before the start
        raise ValueError("planted")
    return [float(c == a) for c, a in zip(completions, answer)]
"""


def test_a_slow_start_is_told_and_what_goes_wrong_is_kept(make_run, tmp_path, fork_server):
    seconds = 4
    python, rewards = tmp_path / "python", tmp_path / "rewards.py"
    python.write_text(PYTHON.format(seconds=seconds, python=fork_server.launcher()))
    python.chmod(0o755)
    rewards.write_text(REWARDS.format(seconds=2 * seconds))
    arguments = (
        "--grpo.prompts_per_step=4", "--evaluation.num_prompts=2", "--evaluation.interval=0",
        "--training.steps=2", f"--evaluation.function={rewards}:slow", f"--reward.functions={rewards}:raising",
        f"--inference.python={python}", "--checkpoint.enable",
        "--checkpoint.interval=1",
    )  # fmt: skip
    run = make_run(*arguments, program=PROGRAMS / "slow_push.py").succeed()
    url = r"http://127.0.0.1:\d+"
    for line in (
        rf"waiting for embedded servers, \d+ s: 0 of 1 ready; {url}: loading shard 3",
        rf"push of version 0, \d+ s: 0 of 1 servers have it; {url} is syncing",
        r"evaluation at step 0, \d+ s: 2 of 2 completions, \d+ tokens, \d+ tokens/s; their scores are awaited",
    ):
        assert re.search(f"^{line}$", run.console, re.MULTILINE), (line, run.console)

    first = run.records("events.jsonl")
    raised = "First of the rewards that raised: assets/reverse_digits/train.jsonl:"
    planted = [event for event in first if event["text"].startswith(raised)]
    assert len(planted) == 1 and planted[0]["level"] == "warning"
    assert all(event["text"].splitlines()[0] in run.console for event in first)
    again = make_run(*arguments, "--training.steps=3", "--observe.progress=none").succeed()
    events = again.records("events.jsonl")
    assert events[: len(first)] == first
    assert [e["step"] for e in events] == sorted(e["step"] for e in events)
    assert len(events) > len(first) and events[-1]["step"] >= 2
    assert "waiting for embedded servers" not in again.console
