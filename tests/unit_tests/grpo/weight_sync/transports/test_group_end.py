# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A source's end of a group, with a real peer that comes, stays away, stops or dies."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from light import LIGHT
from torch.distributed import distributed_c10d

from torchtitan.grpo.weight_sync.transports import group_end
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_wire import receiving
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

URL = "http://127.0.0.1:9"
PEER = """
import json, sys
import torch, torch.distributed as dist
from torchtitan.grpo.weight_wire.process_group import create_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo
info = json.loads(sys.argv[1]) | {"timeout_seconds": 30.0}
group = create_weight_group(WeightGroupInfo(**info), info["rank_offset"])
print("joined", flush=True)
for line in sys.stdin:
    tensor = torch.empty(int(line), dtype=torch.uint8)
    dist.broadcast(tensor, src=0, group=group)
    print(int(tensor.long().sum()), flush=True)
"""


SERVER = """
import json, os, sys, threading, time
import torch
from torchtitan.grpo.weight_wire import receiving
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo
info = json.loads(sys.argv[1]) | {"timeout_seconds": 60.0}
group = receiving.WeightGroup(WeightGroupInfo(**info))
errors = []
def receive():
    try:
        group.receive(torch.empty(1 << 20, dtype=torch.uint8), torch.device("cpu"))
    except RuntimeError as error:
        errors.append(str(error))
thread = threading.Thread(target=receive)
thread.start()
while group._outstanding is None:
    time.sleep(0.01)
print("waits", flush=True)
sys.stdin.readline()
receiving.leave_groups([group])
thread.join(10)
print(len(receiving._abandoned) > 0, "was left" in errors[0], flush=True)
sys.stdin.readline()
deadline = time.monotonic() + 20
while receiving._abandoned and time.monotonic() < deadline:
    receiving._let_go_of_ended()
    time.sleep(0.05)
print(len(receiving._abandoned), flush=True)
os._exit(0)  # gloo's threads are none that Python could end well
"""


def make_end(timeout_seconds: float = 60.0) -> GroupEnd:
    settings = GroupSettings("auto", "host", timeout_seconds, torch.device("cpu"))
    return GroupEnd(URL, 2, "gloo", settings)


@contextlib.contextmanager
def peer(info: WeightGroupInfo, program: str = PEER) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LIGHT + program, json.dumps(asdict(info))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


def tell(process: subprocess.Popen[str], line: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


async def send(end: GroupEnd, payload: torch.Tensor) -> None:
    await end.send(lambda broadcast: broadcast(payload))


async def test_a_peer_that_stays_away_ends_the_join_at_the_timeout():
    end = make_end(2.0)
    with pytest.raises(dist.DistError):
        await end.join()
    await end.leave()


async def test_a_join_that_is_cancelled_just_when_the_peer_has_joined_leaves_no_group_behind():
    before = set(distributed_c10d._world.pg_map)
    end = make_end()
    joining = asyncio.create_task(end.join())
    await asyncio.sleep(0)
    with peer(end.info):
        # The event loop is blocked until the group's thread has joined, so that the
        # cancellation comes before the loop learns of it.
        end._thread.submit(lambda: None).result(60.0)
        assert len(distributed_c10d._world.pg_map) == len(before) + 1
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await end.leave()
        assert set(distributed_c10d._world.pg_map) == before


async def test_the_store_ends_with_the_group_even_if_something_still_refers_to_the_end():
    end = make_end()
    address = end.info.master_address, end.info.master_port
    assert address[0] == "127.0.0.1"  # that on the way to the server
    socket.create_connection(address, timeout=10.0).close()
    await end.leave()
    await end.leave()  # harmless
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10.0).close()
    with pytest.raises(RuntimeError):
        await end.join()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_dies_or_stops_fails_the_broadcast_and_leaving_is_short(signum):
    end = make_end()
    with peer(end.info) as process:
        await end.join()
        group = weakref.ref(end._group)
        assert await line_of(process) == "joined"
        for value in (1, 2):
            tell(process, 1000)
            await send(end, torch.full((1000,), value, dtype=torch.uint8))
            assert await line_of(process) == str(1000 * value)
        process.send_signal(signum)
        # More than sockets hold, so that it cannot end without the peer.
        sending = asyncio.create_task(send(end, torch.zeros(64 * 1024**2, dtype=torch.uint8)))
        await asyncio.wait({sending}, timeout=60.0 if signum == signal.SIGKILL else 0.2)
        assert sending.done() == (signum == signal.SIGKILL)
        begin = time.monotonic()
        await end.leave()
        # Far from the group's 60 s, which the stopped peer would take.
        assert time.monotonic() - begin < 20
        process.kill()
        with pytest.raises(RuntimeError) as raised:
            await sending
        assert raised.value.__traceback__ is not None
        # A gloo group keeps its sockets and threads as long as anything refers to it, as an
        # error might; leave() does not wait for a slow destruction.
        async with asyncio.timeout(60.0):
            while group() is not None:
                await asyncio.sleep(0.01)


async def test_a_communicator_that_is_slow_to_end_holds_up_no_other_server(monkeypatch):
    """NCCL's abort may wait for the driver; the event loop serves all lanes meanwhile."""
    ending, may_end = threading.Event(), threading.Event()

    def destroy(group: object) -> None:
        ending.set()
        assert may_end.wait(30)

    monkeypatch.setattr(group_end, "destroy_weight_group", destroy)
    end = make_end()
    end._group = object()  # pyright: ignore[reportAttributeAccessIssue]
    leaving = asyncio.create_task(end.leave())
    assert await asyncio.to_thread(ending.wait, 30), "the loop goes on"
    assert not leaving.done()
    may_end.set()
    await leaving


async def test_nothing_is_broadcast_after_one_that_was_given_up_before_its_turn():
    end = make_end()
    begun, may_end, sent = threading.Event(), threading.Event(), list[int]()

    def first(broadcast: object) -> None:
        begun.set()
        assert may_end.wait(30)

    sending = asyncio.create_task(end.send(first))
    await asyncio.to_thread(begun.wait, 30)
    given_up = asyncio.create_task(end.send(lambda broadcast: sent.append(1)))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    late = asyncio.create_task(end.send(lambda broadcast: sent.append(2)))
    may_end.set()
    await sending
    # The server would take its bytes for those of the broadcast that it was told of.
    with pytest.raises(RuntimeError, match="must follow broadcast 1, which was cancelled"):
        await late
    assert sent == []
    await end.leave()


def test_an_address_of_another_host_is_refused():
    elsewhere = GroupSettings("192.0.2.1", "host", 5.0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"weight_sync\.master_address must be an address of this"):
        GroupEnd(URL, 2, "gloo", elsewhere)


async def test_a_group_that_a_server_left_is_kept_no_longer_than_the_trainer_keeps_its_end():
    end = make_end()
    with peer(end.info, SERVER) as process:
        await end.join()
        assert await line_of(process) == "waits"
        tell(process, "leave")
        assert await line_of(process) == "True True"
        await end.leave()
        tell(process, "look")
        assert await line_of(process) == "0"
        assert process.wait(20) == 0


def test_groups_are_left_at_the_same_time(monkeypatch):
    """The driver may end no abort before the other groups' kernels have ended."""
    both = threading.Barrier(2)
    ended = []

    def destroy(group: Any) -> None:
        both.wait(20)
        ended.append(group)

    groups = iter(("one", "other"))
    monkeypatch.setattr(receiving, "create_weight_group", lambda *_: next(groups))
    monkeypatch.setattr(receiving, "destroy_weight_group", destroy)
    infos = [WeightGroupInfo("", 0, 1, 2, name, "nccl", 60.0) for name in "ab"]
    joined = [receiving.WeightGroup(info) for info in infos]
    receiving.leave_groups(joined)
    receiving.leave_groups(joined)  # does nothing
    assert sorted(ended) == ["one", "other"]
