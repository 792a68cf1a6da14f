# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real processes that answer late, hang, crash, close their pipe or write nonsense into it."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from torchtitan.grpo.config import Workers
from torchtitan.grpo.workers.channel import NotPlainData, Refused
from torchtitan.grpo.workers.owner import CallFailed, WorkerOwner
from torchtitan.grpo.workers.process import (
    ChannelBroken,
    WorkerKilled,
    WorkerLost,
    WorkerProcess,
    limits_of,
)

TOY_WORKER = """
import os, subprocess, time
import msgspec
from torchtitan.grpo.workers.channel import Refused, WorkerChannel

class Said(msgspec.Struct, tag=True):
    value: object

channel, held = WorkerChannel(msgspec.msgpack.decode), []
while (received := channel.read()) is not None:
    call, request = received
    what, value = request
    if what == "hold":
        held.append((call, value))
    elif what == "release":  # the last one held is answered first
        channel.reply(call, Said(os.getpid()))
        while held:
            held_call, held_value = held.pop()
            channel.reply(held_call, Said(held_value))
    elif what == "spawn":
        channel.reply(call, Said(subprocess.Popen(["sleep", "1000"]).pid))
    elif what == "sleep":
        time.sleep(value)
        channel.reply(call, Said(value))
    elif what == "exit":
        os._exit(value)
    elif what == "close pipe":
        os.close(channel._replies.fileno())
    elif what == "nonsense":
        os.write(channel._replies.fileno(), bytes(value))
    elif what == "wrong call":
        channel.reply(call + 1, Said(value))
    elif what == "refuse":
        channel.reply(call, Refused("kind", value))
    else:
        channel.reply(call, Said(value))
"""


class Said(msgspec.Struct, tag=True):
    value: Any


class Broken(RuntimeError): ...


Toy = WorkerProcess[Said | Refused]
decode = msgspec.msgpack.Decoder(Said | Refused).decode


@pytest.fixture(autouse=True)
def toy_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_worker.py").write_text(TOY_WORKER)
    monkeypatch.chdir(tmp_path)


@contextlib.asynccontextmanager
async def started_process(ends_as: type[WorkerLost] = WorkerLost) -> AsyncIterator[Toy]:
    """A started process, whose end must be told once."""
    reasons: list[WorkerLost] = []
    process = WorkerProcess("toy_worker", decode, reasons.append, Workers())
    try:
        await process.start()
        assert await process.call(("say", "started")) == Said("started")
        yield process
    finally:
        await process.kill()
    assert len(reasons) == 1, "on_end must be called once"
    assert isinstance(reasons[0], ends_as)


def owner_of(load: Any, timeout_seconds: float = 20.0) -> WorkerOwner[Said]:
    return WorkerOwner(
        "toy_worker", decode, load, subject="the toy", calls="toys failed", error=Broken,
        timeout_seconds=(timeout_seconds, "toy.timeout"), most_failures=(3, "toy.limit"),
        workers=Workers(), on_failure=lambda failure: None,
    )  # fmt: skip


def is_running(pid: int) -> bool:
    try:
        # A zombie has ended: its parent, which may be another process, has not asked for its status.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


async def test_replies_out_of_order_reach_their_calls_and_a_late_one_is_dropped():
    async with started_process() as process:
        calls = [asyncio.create_task(process.call(("hold", i))) for i in range(4)]
        await asyncio.sleep(0)
        given_up = calls.pop()
        given_up.cancel()
        await asyncio.wait({given_up})
        assert await process.call(("release", None)) != Said(3)
        assert await asyncio.gather(*calls) == [Said(0), Said(1), Said(2)]
        assert await process.call(("say", "new")) == Said("new")


async def test_a_signal_to_all_processes_of_a_job_costs_no_call():
    # Cluster managers send SIGTERM to each process; the owner ends this one after its checkpoint.
    async with started_process() as process:
        call = asyncio.create_task(process.call(("hold", 7)))
        reply = await process.call(("spawn", None))
        assert isinstance(reply, Said)
        (worker,) = [p for p in psutil.Process().children() if p.pid == os.getpgid(reply.value)]
        worker.terminate()
        await process.call(("release", None))
        assert await call == Said(7)
        psutil.Process(reply.value).terminate()  # a program that it started ends as it usually does
        assert has_ended(reply.value)


async def test_process_that_exceeds_the_time_limit_is_killed_with_its_children():
    async with started_process(WorkerKilled) as process:
        worker, child = await process.call(("release", None)), await process.call(("spawn", None))
        assert isinstance(worker, Said) and isinstance(child, Said)
        with pytest.raises(TimeoutError):
            await process.call_or_kill(("hold", None), 0.2)
        assert process.is_lost
        assert has_ended(worker.value) and has_ended(child.value)
        with pytest.raises(WorkerKilled):
            await process.call(("say", 1))


async def test_cancelled_caller_of_call_or_kill_leaves_no_busy_process():
    async with started_process() as process:
        worker = await process.call(("release", None))
        call = asyncio.create_task(process.call_or_kill(("hold", None), 60.0))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() and process.is_lost
        assert isinstance(worker, Said) and has_ended(worker.value)


async def test_exit_fails_every_pending_call_with_the_exit_code():
    async with started_process() as process:
        pending = [asyncio.create_task(process.call(("hold", i))) for i in range(2)]
        with pytest.raises(WorkerLost, match="ended with exit code 3"):
            await process.call(("exit", 3))
        for call in pending:
            with pytest.raises(WorkerLost, match="ended with exit code 3"):
                await call


async def test_process_that_closes_its_pipe_is_killed():
    async with started_process() as process:
        worker = await process.call(("release", None))
        with pytest.raises(WorkerLost, match="closed its pipe"):
            await process.call(("close pipe", None))
        assert isinstance(worker, Said) and has_ended(worker.value)


@pytest.mark.parametrize(
    "request_",
    [
        ("nonsense", [2, 0, 0, 0, *(0 for _ in range(8)), 255, 255]),
        ("nonsense", [255] * 12),
        ("wrong call", 1),
    ],
)
async def test_what_is_not_a_reply_is_never_taken_for_one(request_):
    async with started_process() as process, asyncio.timeout(60):
        with pytest.raises(ChannelBroken, match="reply of the worker process is not valid"):
            await process.call(request_)


async def test_request_that_is_not_plain_data_leaves_the_process_as_it_is():
    async with started_process() as process:
        for value in (object(), 2**64, "\ud800"):
            with pytest.raises(NotPlainData):
                await process.call_or_kill(("say", value), 30.0)
            assert await process.call(("say", 1)) == Said(1)


async def test_owner_hands_out_loaded_processes_and_kills_them_when_it_is_closed():
    owner = owner_of(("release", None))
    (first, one), (second, two) = await asyncio.gather(owner.start(), owner.start())
    assert is_running(one.value) and is_running(two.value) and one.value != two.value
    await first.kill()
    assert is_running(two.value), "only one of them was killed"
    await owner.close()
    assert second.is_lost and has_ended(one.value) and has_ended(two.value)
    with pytest.raises(WorkerLost, match="run is ending"):
        await owner.start()


def test_a_worker_cannot_raise_its_limit_of_memory():
    assert limits_of(Workers(max_memory_gib=1.5)) == {resource.RLIMIT_AS: (3 << 29, 3 << 29)}
    assert limits_of(Workers()) == {}


def test_only_failures_in_a_row_end_the_run():
    owner = owner_of(None)
    for row in range(2):
        if row:
            owner.record_success()
        for _ in range(2):
            owner.record_failure(CallFailed("timeout", "too slow"))
    with pytest.raises(Broken) as caught:
        owner.record_failure(CallFailed("crash", "it ended"))
    assert str(caught.value) == "3 toys failed (toy.limit = 3). The last reason: it ended"
    assert dict(owner.failures) == {"timeout": 4, "crash": 1}


@pytest.mark.parametrize(
    ("load", "timeout_seconds", "message"),
    [
        (("refuse", "no such thing"), 20.0, "^no such thing$"),
        (("exit", 4), 20.0, "Importing the toy ended .* exit code 4.*rollout_process.log"),
        (("sleep", 1000), 0.2, "Importing the toy took longer than 2 s, 10 times toy.timeout"),
    ],
)
async def test_owner_reports_why_the_code_cannot_be_loaded(load, timeout_seconds, message):
    before = set(psutil.Process().children())
    with pytest.raises(Broken, match=message):
        await owner_of(load, timeout_seconds).start()
    assert set(psutil.Process().children()) <= before


async def test_owner_that_is_closed_during_a_start_leaves_no_process():
    before = set(psutil.Process().children())
    owner = owner_of(("sleep", 1000))
    starting = asyncio.create_task(owner.start())
    while set(psutil.Process().children()) <= before:
        await asyncio.sleep(0)
    await owner.close()
    with pytest.raises(WorkerLost):
        await starting
    assert set(psutil.Process().children()) <= before
