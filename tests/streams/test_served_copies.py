# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""New weights reach the embedded server's GPU beside decoding, and replace the old ones in order.

The recorder's training thread and training stream stand for the engine's: nothing may wait on the
thread, and nothing but decoding may use the stream.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from recorder import Recorder, Stream

from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.weight_wire import staging as staging_module
from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.staging import Staging, StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

CUDA = torch.device("cuda", 0)
NAMES = ("a", "b", "c")
SIZE = 24


class Trainer:
    """A gloo group whose broadcasts hold one value in every element, in bfloat16."""

    name, is_nccl, timeout_seconds = "group", False, 5.0

    def __init__(self) -> None:
        self.value = 0.0

    def receive(self, tensor: torch.Tensor, *_: Any) -> None:
        tensor.view(torch.bfloat16).copy_(torch.full((SIZE,), self.value, dtype=torch.bfloat16))


class Server:
    """The weights of a server, the pool of its buckets, and a decoding step that reads them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameters = {n: torch.zeros(SIZE, dtype=dtype, device=CUDA) for n in NAMES}
        model: Any = SimpleNamespace(state_dict=lambda keep_vars: self.parameters)
        self.table = WeightTable(model)
        self.buffers = BufferPool(pinned=True)
        self.trainer = Trainer()
        self.place = StagingPlace(
            CUDA, self.table.in_wire_dtype, self.table.prepared, stream=self.table.stream
        )

    def decode(self) -> None:
        for parameter in self.parameters.values():
            torch.add(parameter, 1)

    def push(self, value: float) -> None:
        """Sends a version in one bucket for each tensor, and swaps it in while decoding goes on."""
        self.trainer.value, staging = value, Staging(self.place, self.buffers)
        group: Any = self.trainer
        for name in NAMES:
            staging.announce(BucketSpec((name,), ("bfloat16",), ((SIZE,),)), group)
            self.decode()
        found: dict[str, torch.Tensor] = {}

        def end() -> None:
            found.update(staging.collect(5.0))
            self.table.wait_prepared()

        request = threading.Thread(target=end)
        request.start()
        request.join()
        self.decode()
        self.table.adopt(found)
        found.clear()
        self.decode()
        self.buffers.settle(self.table.tensors())


def push_twice(dtype: torch.dtype = torch.bfloat16) -> Server:
    server = Server(dtype)
    server.push(1.0)
    server.push(2.0)
    return server


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_waits_for_no_copy_and_reads_whole_versions(
    recorder: Recorder, dtype: torch.dtype
):
    server = push_twice(dtype)
    assert recorder.problems == []
    for parameter in server.parameters.values():
        assert parameter.cpu().tolist() == [2.0] * SIZE


def test_parameters_keep_their_addresses_which_graphs_hold(recorder: Recorder):
    server = Server(torch.bfloat16)
    before = [parameter.data_ptr() for parameter in server.parameters.values()]
    server.push(1.0)
    assert [parameter.data_ptr() for parameter in server.parameters.values()] == before


def test_buckets_are_pinned(recorder: Recorder):
    server = Server(torch.bfloat16)
    buffer = server.buffers.take(8, torch.device("cpu"))
    assert recorder._memory_of(buffer) is not None


def on_the_decoding_stream() -> mock._patch:
    return mock.patch.object(StagingPlace, "on_stream", lambda _: staging_module.nullcontext())


def without_a_stream() -> mock._patch:
    """As it was: `prepared` copies on the current stream."""
    return mock.patch.object(WeightTable, "on_stream", lambda _: staging_module.nullcontext())


def without_order() -> mock._patch:
    return mock.patch.object(Stream, "wait_stream", lambda *_: None)


def without_waiting_before_reuse() -> mock._patch:
    return mock.patch.object(Stream, "synchronize", lambda *_: None)


@pytest.mark.parametrize(
    ("plants", "problem"),
    [
        ([on_the_decoding_stream, without_a_stream], "wrong stream"),
        ([without_order], "freed in use"),
        ([without_waiting_before_reuse], "race"),
    ],
)
def test_a_planted_defect_is_reported(
    recorder: Recorder, plants: list[Callable[[], mock._patch]], problem: str
):
    patches = [plant() for plant in plants]
    for patch in patches:
        patch.start()
    try:
        push_twice()
    finally:
        for patch in patches:
            patch.stop()
    assert any(problem in found for found in recorder.problems), recorder.problems
