# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The push follows the rules of streams in docs/weight_sync.md; what breaks one is reported."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from push_rig import CUDA, PushRig, ServedModel, single_rank
from recorded import Channel
from recorder import _PATIENCE_SECONDS, Recorder

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.vllm.updates import WorkerUpdates
from torchtitan.grpo.weight_sync import slot_layout, snapshot
from torchtitan.grpo.weight_sync.snapshot import Snapshots, _StreamCopies
from torchtitan.grpo.weight_sync.transports.group_end import GroupEnd
from torchtitan.grpo.weight_wire import device_broadcast, receiving
from torchtitan.grpo.weight_wire.device_broadcast import DeviceBroadcast
from torchtitan.grpo.weight_wire.device_lanes import DeviceLane
from torchtitan.grpo.weight_wire.receiving import WeightGroup
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo


@pytest.fixture(autouse=True)
def default_group(tmp_path) -> Iterator[None]:
    single_rank(tmp_path)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_rig(recorder: Recorder) -> Iterator[Callable[..., PushRig]]:
    rigs: list[PushRig] = []

    def make(*args: Any, **kwargs: Any) -> PushRig:
        rigs.append(PushRig(recorder, *args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def push_versions(rig: PushRig, count: int = 4) -> None:
    """Pushes versions: some one by one, the last ones while others are still under way."""
    for _ in range(count):
        rig.step()
        rig.wait_served()
    for _ in range(3):
        rig.step()
    rig.wait_served()


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("num_servers", "pieces"), [(1, {}), (2, {}), (1, {"in_pieces": False}), (1, {"on_host": True})]
)
def test_pushes_break_no_rule_and_arrive(
    make_rig, recorder, num_servers: int, pieces: dict[str, bool], delta: bool
):
    sync = WeightSync(attest_every=0, timeout_seconds=20.0, delta=delta)
    rig = make_rig(num_servers, sync=sync, **pieces)
    assert rig.publisher.snapshots.stalled_seconds == 0, "there was no fence yet"
    push_versions(rig)
    assert rig.publisher.metrics()["weight_sync/fence_seconds"] > 0
    for server in rig.servers.values():
        assert rig.served_values(server) == {float(rig.version + 1)}
    assert rig.publisher.num_failures == 0
    assert recorder.problems == []


def test_a_stopped_server_stalls_neither_training_nor_another_server(make_rig, recorder):
    rig = make_rig(2)
    push_versions(rig, 1)
    stopped, other = rig.servers.values()
    for name, channel in rig.channels.items():
        channel.is_stopped = name in stopped.updates.session._groups
    for _ in range(5):
        rig.step()
    version = rig.version
    lanes = {lane.url: lane for lane in rig.publisher.lanes}
    rig.wait_until(lambda: lanes[other.url].version >= version)
    assert lanes[stopped.url].version < version
    assert recorder.problems == []


def test_a_server_that_leaves_amid_a_transfer_serves_nothing_of_it(make_rig, recorder):
    # The trainer may have queued a broadcast after the server has left, which nobody receives.
    rig = make_rig(1, sync=WeightSync(attest_every=0, timeout_seconds=1.0, retry_seconds=0.01))
    push_versions(rig, 1)
    (server,) = rig.servers.values()
    served = rig.served_values(server)
    (channel,) = rig.channels.values()
    channel.is_stopped = True
    rig.step()
    rig.wait_until(channel.is_awaited)
    server.leave()
    assert rig.served_values(server) == served
    rig.wait_served()
    assert rig.publisher.num_failures >= 1
    assert rig.served_values(server) == {float(rig.version + 1)}
    assert recorder.problems == []


# -- planted bugs --------------------------------------------------------------------------


def broadcast_as_it_was(end: Any, payload: torch.Tensor) -> None:
    payload = payload.to(CUDA)
    dist.broadcast(payload, src=0, group=end._group)
    torch.cuda.current_stream().synchronize()


def receive_as_it_was(group: Any, tensor: torch.Tensor, *_: Any) -> None:
    work = dist.broadcast(tensor, src=0, group=group._group, async_op=True)
    assert work is not None
    work.wait()
    torch.cuda.current_stream(tensor.device).synchronize()


def start_without_waiting(copies: Any, slot: int, announce: Any, wake: Any) -> None:
    with torch.cuda.stream(copies._stream):
        for target, source in zip(copies._slots[slot], copies._sources, strict=True):
            target.copy_(source.to(target.dtype), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(copies._stream)
    copies._last = copies._copied[slot] = copied
    announce()
    wake()


def buffer_of_the_default_pool(
    broadcast: Any, device: Any, url: str, largest: int, timeout: float
) -> None:
    buffer = torch.empty(largest, dtype=torch.uint8, device=device)
    broadcast._lane = DeviceLane(torch.cuda.Stream(device), device, _buffer=buffer)
    broadcast._piece_bytes, broadcast._timeout_seconds = largest, timeout


_shared: dict[int, Any] = {}


def one_stream_for_all(broadcast: Any, device: Any, url: str, largest: int, timeout: float) -> None:
    recorder = id(torch.cuda.Stream)
    stream = _shared.setdefault(recorder, torch.cuda.Stream(device))
    broadcast._lane = DeviceLane(stream, device)
    broadcast._piece_bytes, broadcast._timeout_seconds = largest, timeout


def lane_of_the_pool(device: torch.device, peer: str) -> DeviceLane:
    torch.cuda.set_device(device)
    return DeviceLane(torch.cuda.Stream(device), device)


def copy_before_the_stream(send: Callable[..., None]) -> Callable[..., None]:
    def sent(broadcast: Any, payload: torch.Tensor, group: Any, is_left: Any) -> None:
        send(broadcast, payload.to(CUDA).cpu(), group, is_left)

    return sent


def receive_at_once(group: Any, tensor: torch.Tensor, *_: Any) -> None:
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        dist.broadcast(tensor, src=0, group=group._group)
        received = torch.cuda.Event()
        received.record(stream)
    while not received.query():
        pass


def receive_without_the_end(group: Any, tensor: torch.Tensor, *_: Any) -> None:
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.broadcast(tensor, src=0, group=group._group)


def fence_on_the_host(snapshots: Any, *_: Any) -> None:
    if snapshots._copies._last is not None:
        snapshots._copies._last.synchronize()


def wait_on_any_thread(copies: Any, slot: int, _: float) -> None:
    while not copies._copied[slot].query():
        pass


PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "the broadcast runs on the training stream": (
        GroupEnd, "_broadcast", broadcast_as_it_was, "queues broadcast on the training stream",
    ),
    "the training stream waits for the server": (
        GroupEnd, "_broadcast", broadcast_as_it_was, "the training stream waits for the broadcast",
    ),
    "the generating stream waits for the trainer": (
        WeightGroup, "_receive_on_stream", receive_as_it_was, "the generating stream waits",
    ),
    "the copy to the device runs on the training stream": (
        DeviceBroadcast, "send", copy_before_the_stream(DeviceBroadcast.send),
        "queues copy_ on the training stream",
    ),
    "the copy does not wait for the optimizer step": (
        _StreamCopies, "start", start_without_waiting, "race",
    ),
    "the optimizer step does not wait for the copy": (
        Snapshots, "fence", lambda *_: None, "race: add_",
    ),
    "the reader does not wait for the copy": (
        _StreamCopies, "wait_for", lambda *_: None, "race",
    ),
    "the reader has not chosen its GPU": (
        _StreamCopies, "wait_for", wait_on_any_thread, "no device: weight-gather",
    ),
    "the slots are not pinned": (
        slot_layout, "pin", lambda tensors: None, "the training thread waits",
    ),
    "the buffer comes from the default pool": (
        DeviceBroadcast, "__init__", buffer_of_the_default_pool, "takes memory of the training",
    ),
    "two servers share a stream": (
        DeviceBroadcast, "__init__", one_stream_for_all, "one for another",
    ),
    "the fence waits on the host": (
        Snapshots, "fence", fence_on_the_host, "the training thread waits for an event",
    ),
    "the received bytes go where queued kernels still read": (
        WeightGroup, "_receive_on_stream", receive_at_once, "the broadcast from the trainer",
    ),
    "received bytes are read before they are there": (
        WeightGroup, "_receive_on_stream", receive_without_the_end, "race",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_reported(make_rig, recorder, monkeypatch, bug: str):
    owner, name, replacement, reported = PLANTED[bug]
    monkeypatch.setattr(owner, name, replacement)

    def is_reported() -> bool:
        return any(reported in problem for problem in recorder.problems)

    num_servers = 2 if "two servers" in bug else 1
    sync = WeightSync(attest_every=0, timeout_seconds=3.0)
    rig = make_rig(num_servers, sync=sync, in_pieces=False)
    if num_servers == 2:
        for _ in range(2):
            rig.step()
            rig.wait_served()
        first = next(iter(rig.servers.values()))
        for group, channel in rig.channels.items():
            channel.is_stopped = group in first.updates.session._groups
        for _ in range(3):
            rig.step()
        rig.publisher.wait_for(rig.version, 10.0, is_reported)
    else:
        for _ in range(2):
            rig.step()
            rig.step()  # while the copy of the first may be under way
            rig.publisher.wait_for(rig.version, 10.0, is_reported)
    assert is_reported(), recorder.problems


@pytest.mark.parametrize("from_pool", [False, True])
def test_however_often_a_server_joins_its_stream_is_never_that_of_something_else(
    make_rig, recorder, monkeypatch, from_pool: bool
):
    """Torch's pool has 32 streams, of which each join took two."""
    if from_pool:
        for module in (device_broadcast, receiving):
            monkeypatch.setattr(module, "take_lane", lane_of_the_pool)
        monkeypatch.setattr(snapshot, "new_stream", torch.cuda.Stream)
    sync = WeightSync(
        attest_every=0, timeout_seconds=0.05, retry_seconds=0.01, max_retry_seconds=0.01
    )
    rig = make_rig(1, sync=sync)
    push_versions(rig, 1)
    (server,) = rig.servers.values()
    rig.is_silent = True
    server.leave()
    deadline = time.monotonic() + 60
    while len(rig.channels) < 20:
        assert time.monotonic() < deadline, rig.publisher.lanes[0].last_error
        rig.step()
        time.sleep(0.005)
    is_reported = any("the training stream waits for" in p for p in recorder.problems)
    assert is_reported is from_pool, recorder.problems
    if not from_pool:
        own = [s.actor for s in recorder._streams if s.actor.startswith("stream trainer/own")]
        assert len(own) == 2, "the snapshot's and the server's"
        assert recorder.problems == []


def test_a_delta_of_one_element_is_applied_to_a_base_in_host_memory(make_rig, recorder):
    rig = make_rig(1, sync=WeightSync(attest_every=0, timeout_seconds=20.0, delta=True))
    rig.step()
    rig.wait_served()
    rig.publisher.fence()
    rig.parameters["rows"][0, 0] += 1.0
    rig.version += 1
    rig.publisher.publish(rig.version, rig.publisher.reserve_slot())
    rig.wait_served()
    (server,) = rig.servers.values()
    assert (rig.served_values(server), rig.publisher.num_failures) == ({1.0, 2.0}, 0)


def test_the_memory_of_a_broadcast_that_was_given_up_is_kept(recorder, monkeypatch):
    """Its kernel may still write."""
    channel = Channel(is_stopped=True)
    monkeypatch.setattr(receiving, "create_weight_group", lambda *_: channel.end(1))
    with recorder.process("server"):
        group = WeightGroup(WeightGroupInfo("", 0, 1, 2, "group", "nccl", timeout_seconds=0.05))
        buffer = torch.zeros(8, device=CUDA)
        with pytest.raises(RuntimeError, match=r"No broadcast arrived .* within 0\.05 s"):
            group.receive(buffer, CUDA)
        del buffer
        gc.collect()  # the error's frames hold it
    assert receiving._written and recorder.problems == []
    channel.abort()
    receiving._let_go_of_ended()
    assert not receiving._written


@pytest.mark.parametrize("num_bytes", [8, 24])
def test_a_server_that_does_not_receive_is_given_up_at_the_deadline(recorder, num_bytes: int):
    """The second piece of a payload in pageable memory is copied when the first was received."""
    channel = Channel(is_stopped=True)
    broadcast = DeviceBroadcast(CUDA, "http://127.0.0.1:9", 8, timeout_seconds=0.05)
    payload = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=num_bytes == 8)
    said = rf"{num_bytes} bytes within weight_sync\.timeout_seconds = 0\.05"
    with pytest.raises(TimeoutError, match=said):
        broadcast.send(payload, channel.end(0), lambda: False)  # pyright: ignore
    if num_bytes == 8:
        with pytest.raises(RuntimeError, match="left during a broadcast"):
            broadcast.send(payload, channel.end(0), lambda: True)  # pyright: ignore
    assert device_broadcast._POLL_SECONDS < 0.01
    assert not any("stuck" in problem for problem in recorder.problems), recorder.problems


def test_a_gpu_that_had_no_memory_for_a_server_takes_it_when_there_is_some(recorder, monkeypatch):
    real = DeviceLane.buffer

    def has_none(lane: DeviceLane, num_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceLane, "buffer", has_none)
    with pytest.raises(torch.OutOfMemoryError):
        DeviceBroadcast(CUDA, "http://127.0.0.1:9", 8, timeout_seconds=1.0)
    monkeypatch.setattr(DeviceLane, "buffer", real)
    DeviceBroadcast(CUDA, "http://127.0.0.1:9", 8, timeout_seconds=1.0).close()


def test_a_lane_is_not_given_back_while_a_broadcast_is_launched_in_it(recorder, monkeypatch):
    """A server that joins again would use its stream and its buffer at the same time."""
    channel, launching, go_on = Channel(), threading.Event(), threading.Event()
    monkeypatch.setattr(receiving, "create_weight_group", lambda *_: channel.end(1))
    monkeypatch.setattr(receiving, "destroy_weight_group", lambda group: group.channel.abort())
    with recorder.process("server"):
        torch.cuda.set_device(CUDA)
        group = WeightGroup(WeightGroupInfo("", 0, 1, 2, "group", "nccl", timeout_seconds=5.0))
        buffer = torch.zeros(8, device=CUDA)

        @contextmanager
        def turn() -> Iterator[None]:
            launching.set()
            assert go_on.wait(_PATIENCE_SECONDS)
            yield

        def receive() -> None:
            torch.cuda.set_device(CUDA)
            with pytest.raises(RuntimeError, match="was left"):
                group.receive(buffer, CUDA, turn())

        receiver = threading.Thread(target=receive)
        receiver.start()
        assert launching.wait(_PATIENCE_SECONDS)
        leaving = group.begin_leave()
        assert leaving is not None and group._lane is not None
        time.sleep(0.05)
        assert group._lane.is_taken
        go_on.set()
        for thread in (receiver, leaving):
            thread.join(_PATIENCE_SECONDS)
        assert not group._lane.is_taken


def test_over_gloo_a_bucket_that_is_loaded_at_once_is_received_into_host_memory(recorder):
    with recorder.process("server"):
        torch.cuda.set_device(CUDA)
        model = ServedModel()
        updates = WorkerUpdates(model, CUDA)
        spec = BucketSpec(("hf.norm",), ("bfloat16",), ((7,),))
        received = []

        def receive(payload: torch.Tensor, device: torch.device) -> None:
            received.append(payload.device.type)
            payload.copy_(torch.ones(7, dtype=torch.bfloat16).view(torch.uint8))

        updates._load_received(spec, SimpleNamespace(is_nccl=False, receive=receive))  # pyright: ignore
        assert received == ["cpu"]
        assert model.parameters["hf.norm"].view(torch.int16).numpy().tolist() == [0x3F80] * 7
