# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Looks whether streams of pushes are shared with anything, and whether a join starts watchdogs.

Torch hands out 32 streams of a device in turn, for each priority, and its NCCL groups take theirs
from them. A watchdog thread of NCCL may end the process when a server is lost.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from pathlib import Path

import torch

from check_gpu.parts import (
    device_of,
    join_alone,
    make_pushed,
    wait_for_end_of_leaves,
)
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.start.lost_rank import dump_flight_recorder
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_wire.device_broadcast import DeviceBroadcast

_JOINS, _SERVERS, _GROUPS, _BUCKET = 40, 8, 3, 16 * 2**20
_SENDS = 200  # of the last group: communicators that do not block have hung at random
_TIMEOUT_SECONDS = 20.0
_MAX_LEAVE_SECONDS = 5.0
_WATCHDOG = "pt_nccl_watchdg"  # as torch names the thread, which Linux cuts at 15 letters


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for the streams of many joins, one for the threads of a few, and one for torch's record of them."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # as torchtitan switches it on
    device = device_of(settings)
    join_alone()
    if settings.on_gpu:
        yield _streams(device)
    else:
        yield Row(f"streams of {_JOINS} joins", "skipped", reason="It needs a GPU.")
    yield asyncio.run(_joins(device, "nccl" if settings.on_gpu else "gloo"))
    # A run reads the record when a rank is lost. This comes last, because it could end the process.
    record = dump_flight_recorder()
    yield Row(
        "the flight recorder after groups were left", "measured", {"bytes": float(len(record))}
    )


def _streams(device: torch.device) -> Row:
    pushed = make_pushed({"one": torch.randn(64, 64, device=device)}, device, 2)
    torchs = {
        torch.cuda.Stream(device, priority).cuda_stream for priority in (0, -1) for _ in range(64)
    }
    torchs.add(torch.cuda.current_stream().cuda_stream)
    snapshot = pushed.snapshots._copies._stream.cuda_stream  # pyright: ignore
    before, streams, senders = torch.cuda.memory_reserved(), set(), {}
    for number in range(_JOINS):
        url = f"http://server-{number % _SERVERS}"
        if url in senders:
            senders[url].close()
        senders[url] = DeviceBroadcast(device, url, _BUCKET, _TIMEOUT_SECONDS)
        streams.add(senders[url]._lane.stream.cuda_stream)
    figures = {
        "streams": float(len(streams)), "equal_to_torchs": float(len(streams & torchs)),
        "equal_to_snapshot": float(snapshot in streams), "snapshot_equals_torchs": float(snapshot in torchs),
        "reserved_mib": (torch.cuda.memory_reserved() - before) / 2**20,
    }  # fmt: skip
    holds = not streams & torchs and snapshot not in streams | torchs and len(streams) <= _SERVERS
    bound = f"none of them is torch's or the snapshot's, and there are at most {_SERVERS}"
    return judged(f"streams of {_JOINS} joins", holds, bound, figures)


async def _joins(device: torch.device, backend: str) -> Row:
    """Joins groups of this process alone, as for a server, and broadcasts once in each."""
    settings = GroupSettings("127.0.0.1", "auto", _TIMEOUT_SECONDS, device, _BUCKET)
    payload = torch.ones(_BUCKET, dtype=torch.uint8, pin_memory=device.type == "cuda")
    before, most, times = _threads(), Counter[str](), defaultdict[str, float](float)
    aborts: list[float] = []

    async def timed(name: str, step: Awaitable[None]) -> None:
        begin = time.perf_counter()
        await step
        times[name] = max(times[name], time.perf_counter() - begin)

    for number in range(_GROUPS):
        end = GroupEnd(f"http://127.0.0.1:{9 + number}", 1, backend, settings)
        await timed("longest_join_seconds", end.join())
        for _ in range(_SENDS if number == _GROUPS - 1 else 1):
            await timed("longest_send_seconds", end.send(lambda send: send(payload)))
        most |= _threads() - before
        await timed("longest_leave_seconds", end.leave())
        aborts.append(wait_for_end_of_leaves(_TIMEOUT_SECONDS))
    figures = {
        "new_watchdogs": float(most[_WATCHDOG]),
        "new_threads": float(most.total()),
        **times,
        "longest_abort_after_leave_seconds": max(aborts),
    }
    facts = {"new": ", ".join(f"{count} {name}" for name, count in sorted(most.items()))}
    holds = most[_WATCHDOG] == 0 and max(aborts) <= _MAX_LEAVE_SECONDS
    bound = f"no watchdog is started, and groups are aborted within {_MAX_LEAVE_SECONDS:g} s"
    return judged(f"threads of {_GROUPS} joins over {backend}", holds, bound, figures, facts=facts)


def _threads() -> Counter[str]:
    """Returns how many threads of each name this process has; Python's have the name of its program."""
    names: Counter[str] = Counter()
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names[file.read_text().strip()] += 1
    return names
