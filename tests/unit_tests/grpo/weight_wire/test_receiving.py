# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests that a server can leave a group while it waits for a broadcast."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

import torch
from light import LIGHT

from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_wire import receiving

SERVER = """
import json, os, sys, threading, time
import torch
from torchtitan.grpo.weight_wire import receiving
info = json.loads(sys.argv[1])
group = receiving.WeightGroup(
    info["master_address"], info["master_port"], info["rank_offset"], info["world_size"],
    info["group_name"], info["backend"], 60.0,
)
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
group.leave()
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


async def test_a_group_that_was_left_is_kept_no_longer_than_the_trainer_keeps_its_end():
    end = GroupEnd(
        "http://127.0.0.1:9",
        2,
        "gloo",
        GroupSettings("auto", "host", 60.0, torch.device("cpu")),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", LIGHT + SERVER, json.dumps(asdict(end.info))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    async def line() -> str:
        assert process.stdout is not None
        return (await asyncio.to_thread(process.stdout.readline)).strip()

    def go_on() -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        await end.join()
        assert await line() == "waits"
        go_on()
        assert await line() == "True True"
        await end.leave()
        go_on()
        assert await line() == "0"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)


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
    joined = [receiving.WeightGroup("", 0, 1, 2, name, "nccl", 60.0) for name in "ab"]
    receiving.leave_groups(joined)
    receiving.leave_groups(joined)  # does nothing
    assert sorted(ended) == ["one", "other"]
