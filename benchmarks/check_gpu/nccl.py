# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Leaves NCCL groups, as a push does when a server is gone."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist

from check_gpu.parts import join_alone, wait_for_end_of_leaves
from check_gpu.row import Row, Settings, judged
from check_gpu.silent_server import sleep_cycles
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.groups import listening_store
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_wire.device_lanes import give_back, take_lane
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

NUM_BYTES = 64 * 1024**2
_RECEIVER = "check_gpu.nccl_receiver"
_TIMEOUT_SECONDS = 30.0
_KERNEL_SECONDS = 8.0
_MAX_LEAVE_SECONDS = 5.0
_MID_PUSH_SECONDS = 2.0


def run(settings: Settings) -> Iterator[Row]:
    """Yields two rows for a group of this process alone and, with two GPUs, one for a group of two."""
    join_alone()
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    yield _leave(device, beside_kernel=False)
    yield _leave(device, beside_kernel=True)
    if torch.cuda.device_count() < 2:
        reason = "Only a process on another GPU can be lost in a push."
        yield Row("the receiver is killed in a push", "two GPUs", reason=reason)
    else:
        yield asyncio.run(_receiver_is_killed(device, settings))


def _leave(device: torch.device, *, beside_kernel: bool) -> Row:
    """Leaves a group of one rank, with a kernel of another push under way or without one."""
    store = listening_store("127.0.0.1", 1, _TIMEOUT_SECONDS)
    info = WeightGroupInfo("127.0.0.1", store.port, 1, 1, "check_gpu", "nccl", _TIMEOUT_SECONDS)
    group = create_weight_group(info, 0, store)
    cycles, lane = sleep_cycles(_KERNEL_SECONDS), take_lane(device, "another push")
    payload = torch.ones(NUM_BYTES, dtype=torch.uint8, device=device)
    dist.broadcast(payload, src=0, group=group)  # makes the communicator
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    with torch.cuda.stream(lane.stream):
        if beside_kernel:
            torch.cuda._sleep(cycles)
        ended.record()
    begin = time.monotonic()
    destroy_weight_group(group)
    seconds, still_ran = time.monotonic() - begin, not ended.query()
    give_back(lane)
    figures = {"leave_seconds": seconds, "kernel_still_ran": float(still_ran)}
    if not beside_kernel:
        bound = f"left within {_MAX_LEAVE_SECONDS:g} s"
        return judged("a group is left", seconds <= _MAX_LEAVE_SECONDS, bound, figures)
    ended.synchronize()
    return Row(
        "a group is left beside a push to another server", "measured", figures,
        cannot_tell="whether an abort that waits for that push also holds up training",
    )  # fmt: skip


async def _receiver_is_killed(device: torch.device, settings: Settings) -> Row:
    group = GroupSettings("127.0.0.1", "nccl", _TIMEOUT_SECONDS, device, NUM_BYTES)
    end = GroupEnd("http://127.0.0.1:9", 2, "nccl", group)
    log = settings.folder / "receiver.log"
    receiver = start_child(
        [*LIGHT_PYTHON, _RECEIVER, json.dumps(asdict(end.info), allow_nan=False)], log_file=log
    )
    payload = torch.ones(NUM_BYTES, dtype=torch.uint8).pin_memory()
    try:
        await end.join()
        begin = time.monotonic()
        await end.send(lambda send: send(payload))
        push_seconds = time.monotonic() - begin
        return await _kill_in_push(end, receiver, payload, device, push_seconds)
    except Exception as error:
        raise RuntimeError(f"{error}\nThe receiver wrote:\n{log.read_text()[-2000:]}") from error
    finally:
        await end.leave()
        stop_children([receiver])


async def _kill_in_push(
    end: GroupEnd,
    receiver: subprocess.Popen,
    payload: torch.Tensor,
    device: torch.device,
    push_seconds: float,
) -> Row:
    sending = asyncio.create_task(end.send(lambda send: send(payload)), name="push")
    await asyncio.sleep(_MID_PUSH_SECONDS)  # the receiver does not receive a second time
    was_waiting = not sending.done()
    receiver.kill()
    begin = time.monotonic()
    await end.leave()
    leave_seconds = time.monotonic() - begin
    abort_seconds = leave_seconds + wait_for_end_of_leaves(2 * _MAX_LEAVE_SECONDS)
    done, _ = await asyncio.wait([sending], timeout=_MAX_LEAVE_SECONDS)
    failed = bool(done) and sending.exception() is not None
    product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    is_usable = float(product.sum()) == 512
    holds = was_waiting and failed and is_usable and abort_seconds <= _MAX_LEAVE_SECONDS
    figures = {
        "first_push_seconds": push_seconds, "leave_seconds": leave_seconds,
        "abort_seconds": abort_seconds, "was_waiting": float(was_waiting), "push_failed": float(failed),
        "gpu_is_usable": float(is_usable),
    }  # fmt: skip
    bound = f"the push fails, aborted within {_MAX_LEAVE_SECONDS:g} s, and the GPU computes"
    return judged(
        "the receiver is killed in a push", holds, bound, figures,
        cannot_tell="a host that is lost, whose network reports an error",
    )  # fmt: skip
