# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The optimizer's states leave a lent device and come back in an order that is guaranteed."""

from unittest import mock

import pytest
import torch
from recorded import Stream
from recorder import Recorder

from torchtitan.grpo.training.loan import CudaMemory, Room

CUDA = torch.device("cuda", 0)


def take_steps(*, lends: bool) -> tuple[list[torch.Tensor], Room]:
    """Takes three optimizer steps, with a loan before all but the first; returns the states.

    Nothing waits for the last copies, whose host memory the room holds.
    """
    weight = torch.arange(32.0, device=CUDA).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=False)
    room = Room([], [optimizer], CudaMemory(CUDA), offloads=True)
    for step in range(3):
        if step and lends:
            room.give()
            (state, *_) = room._hosts.values()
            assert optimizer.state[weight]["exp_avg"] is state, "it is in host memory"
            torch.zeros(32, device=CUDA).add_(1)  # may get the memory
            room.reclaim()
        weight.grad = torch.ones(32, device=CUDA) * (step + 1)  # the backward pass
        room.finish_reclaim()
        optimizer.step()
    states = optimizer.state[weight]
    return [states[name] for name in ("exp_avg", "exp_avg_sq")], room


def test_the_order_is_guaranteed_and_the_values_return(recorder: Recorder):
    (found, _room), (expected, _) = take_steps(lends=True), take_steps(lends=False)
    assert recorder.problems == []
    assert [s.cpu().tolist() for s in found] == [s.cpu().tolist() for s in expected]


@pytest.mark.parametrize(
    ("owner", "method", "problem"),
    [
        (Stream, "wait_stream", "race"),
        (Stream, "wait_event", "race"),
        (CudaMemory, "await_copies", "race"),
    ],
)
def test_a_planted_defect_is_reported(recorder: Recorder, owner, method, problem: str):
    with mock.patch.object(owner, method, lambda *_: None):
        take_steps(lends=True)
    assert any(problem in found for found in recorder.problems)


def test_host_memory_is_complete_before_the_device_is_lent(recorder: Recorder):
    """Without the wait, what reads it, such as a checkpoint, would race with the copy."""

    def copy_without_waiting(memory: CudaMemory, copies) -> None:
        for host, state in copies:
            host.copy_(state, non_blocking=True)

    with mock.patch.object(CudaMemory, "copy_out", copy_without_waiting):
        _room = room_and_read()  # held with its host memory, which another would get
    assert any("race" in found for found in recorder.problems)
    recorder.problems.clear()
    room_and_read()
    assert recorder.problems == []


def room_and_read() -> Room:
    weight = torch.ones(8, device=CUDA).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    weight.grad = torch.ones(8, device=CUDA) * 3
    optimizer.step()
    room = Room([], [optimizer], CudaMemory(CUDA), offloads=True)
    room.give()
    assert optimizer.state[weight]["momentum_buffer"].add(0).tolist() == [3.0] * 8
    return room
