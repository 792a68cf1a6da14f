# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Kills and stops of lent servers and of ranks, in each state of rank 0's lanes.

Two servers share the devices of two ranks. A fault hits one of them, the rank beside it, or both.
"""

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from torchtitan.grpo.weight_sync.lane import LaneState

HELD_LANE = Path(__file__).resolve().parents[1] / "programs/held_lane.py"
STATES = ("joining", "syncing", "attesting", "ready", "lost", "asleep")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
KEY = "key-of-the-test"
# A stopped server exceeds all of these, and a stopped rank the last one.
LIMITS = (
    "--inference.sleep_timeout_seconds=2", "--inference.control_timeout_seconds=2",
    "--weight_sync.timeout_seconds=3", "--weight_sync.push_timeout_seconds=3",
    "--rollout.request_timeout_seconds=4", "--grpo.lost_rank_seconds=3",
)  # fmt: skip
SMALL = (
    "--grpo.prompts_per_step=4", "--evaluation.num_prompts=2", "--evaluation.interval=0",
    "--inference.num_servers=2", "--inference.restart_seconds=0.1",
    "--inference.max_restart_seconds=0.1", "--inference.max_restarts=100",
    "--weight_sync.retry_seconds=0.2", "--weight_sync.max_retry_seconds=0.2",
)  # fmt: skip
CHECKPOINT = (
    "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2",
    "--checkpoint.async_mode=async",
)  # fmt: skip


@pytest.fixture
def lend(make_run, tmp_path: Path):
    def make(*arguments: str, name: str = "run"):
        environment = {"HELD_LANE": str(tmp_path), "TORCHTITAN_GRPO_API_KEY": KEY}
        return make_run(
            "--inference.lend", *SMALL, *LIMITS, *arguments,
            name=name, program=HELD_LANE, environment=environment,
        )  # fmt: skip

    return make


@contextlib.contextmanager
def held_in(run, state: str) -> Iterator[str]:
    """Makes a lane wait in the state; yields the URL of its server."""
    folder = run.folder.parent
    (folder / "new").write_text(state)
    (folder / "new").rename(folder / "hold")
    if state == "lost":
        make_lose(run)
    run.wait_for((folder / "held").exists)
    try:
        yield (folder / "held").read_text()
    finally:
        (folder / "held").unlink()


def make_lose(run) -> None:
    """A healthy server leaves its groups, so that its next push fails."""
    request = urllib.request.Request(
        f"{server_urls(run)[0]}/leave_weight_groups", b"{}",
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def server_urls(run) -> list[str]:
    words = (re.fullmatch(r"servers/(.*)/window", key) for key in run.metrics[-1])
    return [f"http://{found[1]}" for found in words if found]


def rank_of(run, number: int) -> psutil.Process:
    """The agent's children are the ranks."""
    ranks = psutil.Process(run.process.pid).children()
    return sorted(ranks, key=lambda process: process.pid)[number]


def check_ledger(run) -> None:
    """Each prompt was trained once or is open; none was given up."""
    assert [line["step"] for line in run.records("ledger.jsonl")] == list(
        range(1, len(run.metrics) + 1)
    )
    assert run.fates() == {}
    assert [record["step"] for record in run.metrics] == list(range(1, len(run.metrics) + 1))
    assert all(record["staleness/max_steps"] <= 1 for record in run.metrics)


def total(run, name: str, since: int = 0) -> float:
    return sum(record[name] for record in run.metrics[since:])


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def listeners(url: str) -> set[int | None]:
    port, found = int(url.rpartition(":")[2]), psutil.net_connections("tcp")
    return {c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def hit_server(run, state: str, signum: int) -> None:
    """Then training goes on, and the server serves again, with the newest weights."""
    seen = len(run.metrics)
    begin = time.monotonic()
    with held_in(run, state) as url:
        (pid,) = listeners(url)
        server = psutil.Process(pid)
        server.send_signal(signum)
    run.wait_for(lambda: has_ended(server))  # a stopped one, when it is to sleep
    run.wait_for_step(seen + 3)
    run.wait_for(lambda: listeners(url) - {pid})
    print(state, signum.name, f"{time.monotonic() - begin:.1f} s, kills", total(run, "lend/kills", seen), "steps", len(run.metrics) - seen)


FAULTS = [(state, signum) for state in STATES for signum in (KILL, STOP)]


@pytest.mark.parametrize("faults", [[("syncing", KILL), ("ready", STOP), ("asleep", KILL)], FAULTS])
def test_a_lent_server_that_is_killed_or_stopped_is_started_again_when_it_is_lent_to(lend, faults):
    run = lend("--training.steps=2000")
    run.start()
    run.wait_for_step(2)
    for state, signum in faults:
        hit_server(run, state, signum)
    run.process.terminate()
    run.finish()
    check_ledger(run)
    run.wait_until_processes_end()
