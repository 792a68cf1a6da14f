# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Activations move to the host and back in an order that is guaranteed, and nothing waits for them."""

import weakref
from unittest import mock

import pytest
import torch
from recorded import Stream
from recorder import Recorder

from torchtitan.grpo.pipeline.offload import ActivationOffload, HostCopies, _Moved

CUDA = torch.device("cuda", 0)


def move_and_return(copies: HostCopies) -> torch.Tensor:
    """Moves a tensor away and back while the training stream goes on to use the memory."""
    activation = torch.arange(32.0, device=CUDA) * 2
    host = copies.to_host(activation)
    del activation
    copies.release()
    torch.zeros(32, device=CUDA).add_(1)  # another pass
    copies.release()
    torch.zeros(32, device=CUDA).add_(1)  # one that may get the memory
    arriving = copies.to_device(host)
    torch.ones(32, device=CUDA).add_(1)
    returned = arriving.get() + 0
    del arriving
    return returned


def test_the_order_is_guaranteed_and_the_values_return(recorder: Recorder):
    returned = move_and_return(HostCopies(CUDA))
    assert recorder.problems == []
    assert returned.cpu().tolist() == [2.0 * i for i in range(32)]


_to_host = HostCopies.to_host


def keeping_nothing_that_leaves(copies: HostCopies, tensor: torch.Tensor) -> torch.Tensor:
    host = _to_host(copies, tensor)
    copies._leaving.clear()
    return host


@pytest.mark.parametrize(
    ("owner", "method", "planted", "problem"),
    [
        (Stream, "wait_stream", lambda *_: None, "race"),
        (Stream, "wait_event", lambda *_: None, "race"),
        (HostCopies, "to_host", keeping_nothing_that_leaves, "freed in use"),
        (HostCopies, "release", lambda copies: copies._leaving.clear(), "freed in use"),
    ],
)
def test_a_planted_defect_is_reported(recorder: Recorder, owner, method, planted, problem: str):
    with mock.patch.object(owner, method, planted):
        move_and_return(HostCopies(CUDA))
    assert any(problem in found for found in recorder.problems)


def test_memory_is_kept_for_one_pass_though_the_host_runs_ahead(recorder: Recorder):
    copies = HostCopies(CUDA)
    leaving = torch.ones(32, device=CUDA)
    memory = weakref.ref(leaving.untyped_storage())
    copies.to_host(leaving)
    del leaving
    copies.release()
    assert memory() is not None, "The copy has the time of a pass."
    copies.release()
    assert memory() is None
    assert recorder.problems == []


def test_a_tensor_that_nobody_has_awaited_is_not_freed_on_its_way(recorder: Recorder):
    activation, offload = torch.ones(32, device=CUDA), ActivationOffload(CUDA, least_bytes=0)
    moved = _Moved(activation, offload.copies)
    offload._moved[0, 0] = {0: moved}
    offload.host_bytes = moved.nbytes
    offload.fetch((0, 0))
    del moved
    offload.forget_all()
    assert (offload.host_bytes, recorder.problems) == (0, [])
