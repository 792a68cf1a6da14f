# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The recorder reports each kind of hazard, and nothing where the order is guaranteed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from recorder import Channel, Recorder

CUDA = torch.device("cuda", 0)


def test_tensors_of_the_device_know_it_and_compute(recorder: Recorder):
    tensor = torch.arange(6.0, device=CUDA)
    assert tensor.device.type == "cuda" and (tensor * 2).device.type == "cuda"
    on_host = torch.zeros(6)
    assert on_host.device.type == "cpu"
    assert on_host.to(CUDA).device.type == "cuda"
    with pytest.raises(RuntimeError, match="same device"):
        on_host.index_put_((torch.tensor([1], device=CUDA),), torch.zeros(1, device=CUDA))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_two_streams_race_unless_one_waits_for_the_other(recorder: Recorder, is_ordered: bool):
    tensor = torch.zeros(8, device=CUDA)
    side = torch.cuda.Stream()
    if is_ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.add_(1)
    assert any("race" in p for p in recorder.problems) is not is_ordered


@pytest.mark.parametrize("is_ordered", [True, False])
def test_an_event_orders_what_comes_before_its_record_alone(recorder: Recorder, is_ordered: bool):
    tensor = torch.zeros(8, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    event = torch.cuda.Event()
    if not is_ordered:
        event.record(side)
    with torch.cuda.stream(side):
        tensor.add_(1)
    if is_ordered:
        event.record(side)
    torch.cuda.current_stream().wait_event(event)
    tensor.mul_(2)
    assert any("race" in p for p in recorder.problems) is not is_ordered


def test_disjoint_parts_of_a_tensor_do_not_race(recorder: Recorder):
    tensor = torch.zeros(4, 4, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor[:, :2].add_(1)
    tensor[:, 2:].add_(1)
    assert recorder.problems == []
    tensor[:, 1:].add_(1)
    assert any("race" in p for p in recorder.problems)


@pytest.mark.parametrize("is_polled", [True, False])
def test_memory_that_is_freed_goes_back_to_its_own_stream(recorder: Recorder, is_polled: bool):
    tensor = torch.zeros(8, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = tensor + 1
    event = side.record_event()
    if is_polled:
        assert event.query()
    del tensor
    assert any("freed in use" in p for p in recorder.problems) is not is_polled
    del copied


@pytest.mark.parametrize("passes_on", [True, False])
def test_threads_learn_from_each_other_through_queues_and_locks(recorder, passes_on: bool):
    tensor = torch.zeros(8, device=CUDA)
    side, event = torch.cuda.Stream(), torch.cuda.Event()

    def fill() -> None:
        side.wait_stream(before)
        with torch.cuda.stream(side):
            tensor.add_(1)
            event.record(side)
        if passes_on:
            while not event.query():
                pass

    before = torch.cuda.Stream()
    before.wait_stream(torch.cuda.current_stream())
    with ThreadPoolExecutor(1) as executor:
        executor.submit(fill).result()
    tensor.mul_(2)
    assert any("race" in p for p in recorder.problems) is not passes_on


def test_a_background_thread_may_not_use_the_training_stream(recorder: Recorder):
    tensor = torch.zeros(8, device=CUDA)
    thread = threading.Thread(target=lambda: tensor.add_(1))
    thread.start()
    thread.join()
    assert any("queues add_ on the training stream" in p for p in recorder.problems)


def test_a_thread_takes_no_memory_of_the_training_streams_pool(recorder: Recorder):
    torch.zeros(1, device=CUDA)
    thread = threading.Thread(target=lambda: torch.empty(8, device=CUDA))
    thread.start()
    thread.join()
    assert any("takes memory of the training stream" in p for p in recorder.problems)


def test_the_training_thread_may_not_wait_for_a_stream(recorder: Recorder):
    torch.zeros(2, device=CUDA)
    torch.cuda.Stream().synchronize()
    assert any("the training thread waits" in p for p in recorder.problems)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_to_memory_that_is_not_pinned_waits(recorder: Recorder, is_pinned: bool):
    source, target = torch.ones(8, device=CUDA), torch.zeros(8)
    if is_pinned:
        torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.nbytes, 0)
    target.copy_(source, non_blocking=True)
    assert any("the training thread waits" in p for p in recorder.problems) is not is_pinned


def test_a_broadcast_makes_whoever_waits_for_it_wait_for_the_server(recorder: Recorder):
    channel, payload = Channel(), torch.ones(8, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.broadcast(payload, src=0, group=channel.end(0))  # pyright: ignore
    sent = side.record_event()
    assert not sent.query() and recorder.problems == []
    with recorder.process("server"), torch.cuda.stream(torch.cuda.Stream()):
        received = torch.zeros(8, device=CUDA)
        dist.broadcast(received, src=0, group=channel.end(1))  # pyright: ignore
    assert sent.query() and received.tolist() == [1.0] * 8
    channel.is_stopped = True
    with torch.cuda.stream(side):
        dist.broadcast(payload, src=0, group=channel.end(0))  # pyright: ignore
    torch.cuda.current_stream().wait_stream(side)
    assert any("the training stream waits for the broadcast" in p for p in recorder.problems)
