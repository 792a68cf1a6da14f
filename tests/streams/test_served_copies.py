# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""New weights reach the embedded server's GPU beside decoding, and replace the old ones in order.

The recorder's training thread and training stream stand for the engine's: nothing may wait on the
thread, and nothing but decoding may use the stream.
"""

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from recorded import Stream
from recorder import Recorder

from torchtitan.grpo.inference.embedded.weights import WeightTable
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
        for i, name in enumerate(NAMES):
            spec = BucketSpec((name,), ("bfloat16",), ((SIZE,),))
            staging.announce(spec, group, sequence=i)
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
        self.buffers.settle(self.table.parameters.values())


def push_twice(server: Server) -> None:
    server.push(1.0)
    server.push(2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_waits_for_no_copy_and_reads_whole_versions(
    recorder: Recorder, dtype: torch.dtype
):
    server = Server(dtype)
    addresses = [parameter.data_ptr() for parameter in server.parameters.values()]
    push_twice(server)
    assert recorder.problems == []
    for parameter in server.parameters.values():
        assert parameter.cpu().tolist() == [2.0] * SIZE
    # Graphs hold them.
    assert [parameter.data_ptr() for parameter in server.parameters.values()] == addresses


def test_buckets_are_pinned(recorder: Recorder):
    server = Server(torch.bfloat16)
    buffer = server.buffers.take(8, torch.device("cpu"))
    assert recorder._memory_of(buffer) is not None


def no_stream(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize(
    ("plants", "problem"),
    [
        # As it was: `prepared` copies on the current stream.
        ([(StagingPlace, "on_stream", no_stream), (WeightTable, "on_stream", no_stream)], "wrong stream"),
        ([(Stream, "wait_stream", lambda *_: None)], "freed in use"),
        ([(Stream, "synchronize", lambda *_: None)], "race"),
    ],
)  # fmt: skip
def test_a_planted_defect_is_reported(recorder: Recorder, plants: list[Any], problem: str):
    with ExitStack() as patches:
        for plant in plants:
            patches.enter_context(mock.patch.object(*plant))
        push_twice(Server(torch.bfloat16))
    assert any(problem in found for found in recorder.problems), recorder.problems
