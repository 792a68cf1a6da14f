# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks notice that another one is lost, one of them tells it, and rank 0 calls the others."""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.start.lost_rank import describe_lost, describe_next
from torchtitan.grpo.system.rank_channel import Message
from torchtitan.grpo.system.rank_status import (
    LostRank,
    Status,
    StatusBoard,
    claims_report,
    read_status,
)

# A rank may be silent for so long: a short time where the test awaits it, and otherwise longer than
# any rank is silent on a busy machine.
SHORT_SECONDS, LONG_SECONDS = 2.0, 300.0

PROGRAM = """
import json, os, pathlib, signal, socket, sys, time
import torch.distributed as dist
from torchtitan.grpo.system import rank_channel
from torchtitan.grpo.system.rank_channel import RankChannel

rank_channel._BEAT_SECONDS = 0.1  # a rank that gets no core for a while is not lost
folder, ending = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the agent, which sees the end as well
dist.init_process_group("gloo")
rank = dist.get_rank()

def lost(what):
    status = what.status
    found = [status.rank, status.phase, status.completed, what.silent_seconds > 0, what.has_reported]
    (folder / f"lost-{rank}.tmp").write_text(json.dumps(found))
    (folder / f"lost-{rank}.tmp").rename(folder / f"lost-{rank}")

if rank == 0:
    create_server = socket.create_server
    def noting_server(address):
        server = create_server(address)
        (folder / "port").write_text(str(server.getsockname()[1]))
        return server
    socket.create_server = noting_server
watch = RankChannel(float(sys.argv[3]), lost)
watch.start()
for step in range(1, 4):
    watch.board.enter("forward")
    watch.board.enter("optimizer step")
    watch.board.complete(step)
watch.board.enter("waiting")
while any(peer.status.phase != "waiting" for peer in watch._peers):
    time.sleep(0.01)
(folder / f"ready-{rank}-{os.getpid()}").touch()
if str(rank) in ending:
    while not (folder / "go").exists():
        time.sleep(0.01)
    watch.close(failed=ending[str(rank)] == "fails")
    os._exit(0)
while not watch.wait_lost(0.1) and not (folder / "end").exists():
    pass
os._exit(0)
"""


@pytest.fixture
def ranks(fork_server, tmp_path):
    runs = []

    def start(ending: dict[str, str], silent_seconds: float = SHORT_SECONDS) -> dict[int, int]:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        with (tmp_path / "out").open("w") as output:
            arguments = [str(tmp_path), json.dumps(ending), str(silent_seconds)]
            runs.append(fork_server.start(script, arguments, num_ranks=3, output=output))
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3, tmp_path)
        names = [path.name.split("-") for path in tmp_path.glob("ready-*")]
        return {int(rank): int(pid) for _, rank, pid in names}

    yield start
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


def wait_for(holds, folder: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.02)


def found(folder: Path, *ranks: int) -> list:
    wait_for(lambda: all((folder / f"lost-{rank}").exists() for rank in ranks), folder)
    return [json.loads((folder / f"lost-{rank}").read_text()) for rank in ranks]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_known_to_all_with_its_phase_and_step(ranks, tmp_path, victim):
    os.kill(ranks({}, LONG_SECONDS)[victim], signal.SIGKILL)
    others = sorted({0, 1, 2} - {victim})
    assert found(tmp_path, *others) == [[victim, "waiting", 3, False, False]] * 2


def test_strangers_neither_end_the_watch_nor_use_up_its_files(ranks, tmp_path):
    pids = ranks({}, LONG_SECONDS)
    leader = ("127.0.0.1", int((tmp_path / "port").read_text()))
    status = Status(1, "x", 1)
    encoded = [msgspec.msgpack.encode(Message(status, *key)) for key in ((b"wrong",), ())]
    bodies = [*encoded, b"\x91" * 60_000]
    hellos = [*(len(body).to_bytes(4, "big") + body for body in bodies), b"GET / HTTP/1.1\r\n\r\n"]
    held = [socket.create_connection(leader, 60.0) for _ in range(100)]
    for hello in hellos:
        stranger = socket.create_connection(leader, 60.0)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(hello)
            assert stranger.recv(4096) == b"", hello
        stranger.close()
    with contextlib.suppress(ConnectionError):
        assert held[0].recv(1) == b"", "the oldest is closed for the newest"
    os.kill(pids[2], signal.SIGKILL)
    assert found(tmp_path, 0, 1) == [[2, "waiting", 3, False, False]] * 2
    for connection in held:
        connection.close()


def test_a_rank_that_is_frozen_is_lost_after_the_bound(ranks, tmp_path):
    pid = ranks({})[1]
    os.kill(pid, signal.SIGSTOP)
    assert found(tmp_path, 0, 2) == [[1, "waiting", 3, True, False]] * 2
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("how", "is_loss"), [("fails", True), ("ends", False)])
def test_a_rank_that_ends_in_order_is_no_loss_but_one_that_fails_is(ranks, tmp_path, how, is_loss):
    ranks({"1": how}, LONG_SECONDS if is_loss else SHORT_SECONDS)
    (tmp_path / "go").touch()
    if is_loss:
        assert found(tmp_path, 0, 2) == [[1, "waiting", 3, False, True]] * 2
    else:
        time.sleep(3.0)  # longer than a silent rank may take
        assert not list(tmp_path.glob("lost-*"))
    (tmp_path / "end").touch()


def test_the_status_outlives_its_process_in_the_folder_of_torchruns_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    board = StatusBoard()
    board.enter("a phase with a long name")
    board.enter("short")
    board.complete(7)
    expected = Status(3, socket.gethostname(), os.getpid(), "short", 7)
    assert read_status(tmp_path) == expected
    assert expected.describe() == "in step 8, phase: short; the last completed step is 7"
    assert read_status(tmp_path / "nowhere") is None


def test_calls_and_their_failures_cross_ranks(run_ranks):
    leader, follower = run_ranks("channel_ranks", 2)
    for name in ("prepared", "gathering_waits", "error_is_freed"):
        assert leader[name], name
    assert leader["join"] == ["RankCallFailed", "rank 1: RuntimeError: http://server did not come"]
    kind, message = leader["write"]
    assert kind == "OSError"
    assert message.startswith("rank 1: OSError: [Errno 28] No space left on device")
    assert leader["send"] == "given up"
    assert leader["gone"] == ["Rank 1 no longer answers calls."] * 2
    server = "http://server"
    assert follower["calls"] == [
        ["gather", 1, 7, True], ["prepare", 7, 0, 6], ["drop", 5],
        ["send", server, 7, 0, None],
        ["send", server, 8, 0, None], ["leave", server], ["close"],
    ]  # fmt: skip


STATUS = Status(3, "node-b", 4711, "forward and backward", 7)


def test_the_message_names_rank_host_phase_and_the_last_completed_step():
    for lost, how in (
        (LostRank(STATUS), "died in step 8, phase: forward and backward"),
        (LostRank(STATUS, silent_seconds=61.0), "gave no sign of life for 61 s"),
        (LostRank(STATUS, has_reported=True), "failed, for a reason that is printed on its host"),
    ):
        text = describe_lost(lost, JobConfig())
        assert text.startswith(f"Training rank 3 on node-b (process 4711) {how}")
        assert "in step 8, phase: forward and backward; the last completed step is 7." in text


@pytest.mark.parametrize(
    ("most", "count", "enable", "text"),
    [
        (0, 0, True, "--max-restarts N lets torchrun do so"),
        (2, 1, True, "started again, from the newest checkpoint (restart 2 of 2, --max-restarts)"),
        (2, 2, True, "No restart is left (--max-restarts 2)"),
        (2, 0, False, "with step 1, because checkpoint.enable is false (restart 1 of 2"),
    ],
)
def test_the_message_says_what_follows(monkeypatch, most, count, enable, text):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
    config = JobConfig()
    config.checkpoint.enable = enable
    assert text in describe_next(config)


def test_one_rank_of_an_attempt_prints_the_message(tmp_path, monkeypatch):
    for attempt, ranks in ((0, 3), (1, 2)):
        claims = []
        for rank in range(ranks):
            folder = tmp_path / f"attempt_{attempt}/{rank}"
            folder.mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            claims.append(claims_report(STATUS.rank))
        assert claims == [True] + [False] * (ranks - 1)


def test_without_torchrun_the_first_rank_that_lives_prints_the_message(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for lost, expected in ((3, [True, False, False]), (0, [False, True, False])):
        for rank, claims in enumerate(expected):
            monkeypatch.setenv("RANK", str(rank))
            assert claims_report(lost) is claims
