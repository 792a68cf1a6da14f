# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Activations move to the host and back in an order that is guaranteed, and nothing waits for them."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from recorder import Event, Recorder, Stream

from torchtitan.grpo.pipeline.host_copies import HostCopies

CUDA = torch.device("cuda")


def move_and_return(copies: HostCopies) -> torch.Tensor:
    """Moves a tensor away and back while the training stream goes on to use the memory."""
    activation = torch.arange(32.0, device=CUDA) * 2
    host = copies.to_host(activation)
    del activation
    torch.zeros(32, device=CUDA).add_(1)  # another pass, which may get the memory
    copies.release()
    arriving = copies.to_device(host)
    torch.ones(32, device=CUDA).add_(1)
    returned = arriving.get() + 0
    del arriving
    return returned


def test_the_order_is_guaranteed_and_the_values_return(recorder: Recorder):
    returned = move_and_return(HostCopies(CUDA))
    assert recorder.problems == []
    assert returned.cpu().tolist() == [2.0 * i for i in range(32)]


def without_waiting_for_a_stream() -> mock._patch:
    return mock.patch.object(Stream, "wait_stream", lambda *_: None)


def without_waiting_for_an_event() -> mock._patch:
    return mock.patch.object(Stream, "wait_event", lambda *_: None)


def without_keeping_what_leaves() -> mock._patch:
    to_host = HostCopies.to_host

    def to_host_and_forget(copies: HostCopies, tensor: torch.Tensor) -> torch.Tensor:
        host = to_host(copies, tensor)
        copies._leaving.clear()
        return host

    return mock.patch.object(HostCopies, "to_host", to_host_and_forget)


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (without_waiting_for_a_stream, "race"),
        (without_waiting_for_an_event, "race"),
        (without_keeping_what_leaves, "freed in use"),
    ],
)
def test_a_planted_defect_is_reported(
    recorder: Recorder, plant: Callable[[], mock._patch], problem: str
):
    with plant():
        move_and_return(HostCopies(CUDA))
    assert any(problem in found for found in recorder.problems)


def test_memory_is_kept_until_the_copy_is_complete(recorder: Recorder):
    copies = HostCopies(CUDA)
    copies.to_host(torch.ones(32, device=CUDA))
    with mock.patch.object(Event, "query", lambda _: False):
        copies.release()
        assert len(copies._leaving) == 1
    copies.release()
    assert not copies._leaving
    assert recorder.problems == []
