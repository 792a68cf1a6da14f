# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Leaves NCCL groups while a kernel is in flight, as a push does when a server is gone."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist

from torchtitan.grpo.check_gpu.parts import join_alone
from torchtitan.grpo.check_gpu.row import Row, Settings, judged
from torchtitan.grpo.check_gpu.silent_server import sleep_cycles
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.groups import listening_store
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd, GroupSettings
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group

NUM_BYTES = 64 * 1024**2
_RECEIVER = "torchtitan.grpo.check_gpu.nccl_receiver"
_TIMEOUT_SECONDS = 30.0
_KERNEL_SECONDS = 20.0
_MAX_LEAVE_SECONDS = 5.0
_MID_PUSH_SECONDS = 2.0


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for a group of this process alone and, with two GPUs, for one of two."""
    join_alone()
    torch.cuda.set_device(0)
    yield _leave_alone(torch.device("cuda", 0))
    if torch.cuda.device_count() < 2:
        yield Row("the receiver is killed", "skipped", reason="It needs two GPUs.")
    else:
        yield asyncio.run(_receiver_is_killed(torch.device("cuda", 0), settings))


def _leave_alone(device: torch.device) -> Row:
    store = listening_store("127.0.0.1", 1, _TIMEOUT_SECONDS)
    group = create_weight_group(
        "127.0.0.1", store.port, 0, 1, "check_gpu", "nccl", _TIMEOUT_SECONDS, store=store
    )
    cycles, stream = sleep_cycles(_KERNEL_SECONDS), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        payload = torch.ones(NUM_BYTES, dtype=torch.uint8, device=device)
        dist.broadcast(payload, src=0, group=group)  # makes the communicator
        stream.synchronize()
        torch.cuda._sleep(cycles)
        dist.broadcast(payload, src=0, group=group)
        ended = torch.cuda.Event()
        ended.record(stream)
    begin = time.monotonic()
    destroy_weight_group(group)
    seconds, in_flight = time.monotonic() - begin, not ended.query()
    figures = {"leave_seconds": seconds, "kernel_still_ran": float(in_flight)}
    bound = f"left within {_MAX_LEAVE_SECONDS:g} s, while the kernel ran"
    holds = in_flight and seconds <= _MAX_LEAVE_SECONDS
    return judged("a group of one rank is left", holds, bound, figures)


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
    done, _ = await asyncio.wait([sending], timeout=_MAX_LEAVE_SECONDS)
    failed = bool(done) and sending.exception() is not None
    product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    is_usable = float(product.sum()) == 512
    holds = was_waiting and failed and is_usable and leave_seconds <= _MAX_LEAVE_SECONDS
    figures = {
        "first_push_seconds": push_seconds, "leave_seconds": leave_seconds,
        "was_waiting": float(was_waiting), "push_failed": float(failed),
        "gpu_is_usable": float(is_usable),
    }  # fmt: skip
    bound = f"the push fails, left within {_MAX_LEAVE_SECONDS:g} s, and the GPU computes"
    return judged("the receiver is killed in a push", holds, bound, figures)
