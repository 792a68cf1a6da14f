# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Copies of the shards: started by the training thread, made by somebody else."""

import threading

import pytest
import torch

from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.system.host_memory import pin
from torchtitan.grpo.weight_sync.snapshot import Snapshots

CPU = torch.device("cpu")
SECONDS = 30.0


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": torch.nn.Parameter(torch.randn(300, 200, generator=generator)),
        "turned": torch.randn(5, 7, generator=generator).T,
        "empty": torch.zeros(0, 4),
        "bias": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }


def slots_for(parameters, dtype, num_slots=2):
    shapes = {name: local_tensor(p).shape for name, p in parameters.items()}
    return [
        {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        for _ in range(num_slots)
    ]


@pytest.fixture
def snapshots(parameters):
    made = Snapshots(parameters, slots_for(parameters, torch.bfloat16), CPU)
    yield made
    made.close(SECONDS)


class HeldCopies:
    """Holds every copy until it is let go; fails those that it is told to."""

    def __init__(self, monkeypatch):
        self.begun, self.let_go = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None
        self.threads: list[str] = []
        self._copy = torch._foreach_copy_
        monkeypatch.setattr(torch, "_foreach_copy_", self)

    def __call__(self, targets, sources, **how):
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        assert self.let_go.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        self._copy(targets, sources, **how)


@pytest.fixture
def held(monkeypatch):
    return HeldCopies(monkeypatch)


def test_a_slot_holds_the_shards_in_wire_dtype(parameters, snapshots):
    snapshots.copy_into(1)
    got = snapshots.read(1, SECONDS)
    assert list(got) == list(parameters)
    for name, parameter in parameters.items():
        torch.testing.assert_close(got[name], parameter.detach().to(torch.bfloat16), rtol=0, atol=0)


def test_a_rank_that_sends_nothing_has_nothing_to_copy(parameters):
    snapshots = Snapshots(parameters, [{}, {}], CPU)
    snapshots.copy_into(0)
    assert snapshots.read(0, SECONDS) == {}
    snapshots.close(SECONDS)


def test_copy_into_returns_while_nothing_is_copied_yet(held, snapshots):
    snapshots.copy_into(0)
    assert held.begun.acquire(timeout=SECONDS)
    with pytest.raises(TimeoutError, match=r"optimizer step needs .* slot 0.* within 0\.01 s"):
        snapshots.fence(0.01)
    with pytest.raises(TimeoutError, match=r"weight push needs .* slot 0"):
        snapshots.read(0, 0.01)
    held.let_go.release()
    snapshots.fence(SECONDS)
    assert held.threads == ["snapshot-copy"]


def test_a_reader_that_is_told_of_a_slot_waits_for_the_copy_it_is_told_of(held, snapshots):
    held.let_go.release()
    snapshots.copy_into(0)
    snapshots.fence(SECONDS)
    told: list[str] = []

    def announce() -> None:
        # The former copy of the slot has ended; this one has not begun.
        with pytest.raises(TimeoutError):
            snapshots.read(0, 0.0)
        told.append("announced")

    snapshots.copy_into(0, announce, lambda: told.append("woken up"))
    assert told == ["announced"], "readers are woken up when the copy has ended"
    held.let_go.release()
    snapshots.fence(SECONDS)
    snapshots.read(0, 0.0)
    snapshots.close(SECONDS)
    assert told == ["announced", "woken up"]


def test_copies_are_made_one_after_the_other_even_without_a_fence(held, snapshots):
    for slot in (0, 1, 0):
        snapshots.copy_into(slot)
    assert held.begun.acquire(timeout=SECONDS)
    assert not held.begun.acquire(timeout=0.05), "two copies ran at the same time"
    # The reader of slot 0 wants its last copy, not the first one.
    held.let_go.release(2)
    snapshots.read(1, SECONDS)
    with pytest.raises(TimeoutError):
        snapshots.read(0, 0.0)
    held.let_go.release()
    snapshots.read(0, SECONDS)


def test_an_error_of_the_copy_is_raised_where_its_end_is_waited_for(held, snapshots):
    held.error = MemoryError("no room")
    snapshots.copy_into(0)
    held.let_go.release()
    with pytest.raises(RuntimeError, match=r"slot 0, which failed: no room") as caught:
        snapshots.fence(SECONDS)
    assert caught.value.__cause__ is held.error
    with pytest.raises(RuntimeError, match="no room"):
        snapshots.read(0, SECONDS)
    held.error = None
    snapshots.copy_into(0)
    held.let_go.release()
    snapshots.fence(SECONDS)


def test_the_copy_thread_takes_one_core_and_leaves_others_theirs(monkeypatch, parameters):
    before = torch.get_num_threads()
    seen: list[int] = []
    copy = torch._foreach_copy_

    def noted(targets, sources):
        seen.append(torch.get_num_threads())
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    torch.set_num_threads(3)
    try:
        snapshots = Snapshots(parameters, slots_for(parameters, torch.float32), CPU)
        snapshots.copy_into(0)
        snapshots.fence(SECONDS)
        snapshots.close(SECONDS)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join(SECONDS)
        assert [*seen, torch.get_num_threads()] == [1, 3, 3]
    finally:
        torch.set_num_threads(before)


def test_close_waits_for_the_copy_and_ends_the_thread(held, parameters):
    snapshots = Snapshots(parameters, slots_for(parameters, torch.float32), CPU)
    threads = [t for t in threading.enumerate() if t.name == "snapshot-copy"]
    snapshots.copy_into(0)
    with pytest.raises(TimeoutError, match="did not end"):
        snapshots.close(0.01)
    held.let_go.release()
    snapshots.close(SECONDS)
    snapshots.read(0, 0.0)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        snapshots.copy_into(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_fence_orders_the_next_change_after_the_copy(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    parameters = {
        "large": torch.zeros(4096, 4096, device=device),
        "turned": torch.zeros(5, 7, device=device).T,
    }
    slots = slots_for(parameters, dtype)
    for tensors in slots:
        pin(list(tensors.values()))
    snapshots = Snapshots(parameters, slots, device)
    for step in range(6):
        snapshots.fence()
        for parameter in parameters.values():
            parameter.fill_(step)
        snapshots.copy_into(step % 2)
    for slot, step in ((0, 4), (1, 5)):
        got = snapshots.read(slot, SECONDS)
        assert all((tensor == step).all() and tensor.dtype is dtype for tensor in got.values())
    snapshots.close(SECONDS)
