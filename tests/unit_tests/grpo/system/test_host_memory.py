# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Host memory: what is left of it, how it is pinned, and slots that other processes write."""

import dataclasses
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from light import LIGHT

from torchtitan.grpo.system.host_memory import SharedSlots, attach, available_bytes, own_memory, pin

SLOT_BYTES = 3 * 64
PAGE = resource.getpagesize()
ATTACHED = """
import pickle, sys
from torchtitan.grpo.system.host_memory import attach
slots = attach(pickle.loads(sys.stdin.buffer.read()))
print(slots[0].max().item())
slots[1].fill_(9)
"""


def test_free_memory_is_that_of_the_host_or_of_the_limit(tmp_path: Path):
    def free(**files: str) -> int:
        for name, text in files.items():
            (tmp_path / f"memory.{name}").write_text(f"{text}\n")
        return available_bytes(tmp_path)

    memory = psutil.virtual_memory()
    assert abs(free() - memory.available) < 0.1 * memory.total
    no_limit = free(max="max", current="5", stat="inactive_file 2")
    assert abs(no_limit - memory.available) < 0.1 * memory.total
    # The limit of a container counts without what is cached.
    assert free(max="1000", current="700", stat="anon 1\ninactive_file 100") == 1000 - 700 + 100
    assert free(current="5000") == 0


class Driver:
    """The CUDA runtime's function, which this machine may lack; it refuses from a call on."""

    def __init__(self, refuses_from: int) -> None:
        self.refuses_from = refuses_from
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1  # for all contexts of the process
        if len(self.registered) == self.refuses_from:
            return 2  # cudaErrorMemoryAllocation
        self.registered.append((address, num_bytes))
        return 0


def test_each_tensor_is_pinned_and_a_refusal_names_size_error_and_settings(monkeypatch):
    driver = Driver(refuses_from=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(5, dtype=torch.bfloat16)]
    pin(tensors)
    assert driver.registered == [(tensors[0].data_ptr(), 12), (tensors[2].data_ptr(), 10)]
    with pytest.raises(RuntimeError) as error:
        pin([torch.zeros(2**26)])
    for part in ("0.25 GiB", "cudaError 2", "--ulimit memlock=-1", "weight_sync.max_versions"):
        assert part in str(error.value)


@pytest.fixture
def shared():
    made = SharedSlots(SLOT_BYTES, 2)
    yield made
    made.close()


def test_another_process_reads_and_writes_them(shared):
    shared.slots[0].fill_(7)
    assert [len(slot) for slot in shared.slots] == [SLOT_BYTES] * 2
    child = [sys.executable, "-c", LIGHT + ATTACHED]
    done = subprocess.run(child, input=pickle.dumps(shared.offer), capture_output=True, timeout=120)
    assert done.stdout.decode().strip() == "7", done.stderr.decode()
    assert [slot.unique().tolist() for slot in shared.slots] == [[7], [9]]


def share_in_place(slot: torch.Tensor) -> float:
    """The share of a tensor's pages that this process reaches without a page fault."""
    first, last = slot.data_ptr() // PAGE, (slot.data_ptr() + slot.nbytes - 1) // PAGE
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return float(np.mean(entries >> np.uint64(63)))


@pytest.mark.parametrize("whose", ["owner's", "other's", "private"])
def test_the_first_copy_into_a_slot_finds_every_page_in_place(whose):
    num_bytes = 64 * 2**20
    shared = SharedSlots(num_bytes, 1)
    try:
        attached = attach(shared.offer)
        assert attached is not None
        private = own_memory([num_bytes], torch.uint8)
        slot = {"owner's": shared.slots[0], "other's": attached[0], "private": private}[whose]
        share = share_in_place(slot)
    finally:
        shared.close()
    # A machine that is short of memory takes some pages back.
    assert share > 0.9


def test_whoever_has_them_mapped_keeps_them_when_the_owner_closes(shared):
    attached = attach(shared.offer)
    shared.slots[1].fill_(7)
    shared.close()
    assert attached is not None and (attached[1] == 7).all()
    assert attach(shared.offer) is None


def test_another_file_under_the_same_path_is_not_taken_for_it(shared, tmp_path):
    other_secret = dataclasses.replace(shared.offer, secret=bytes(16))
    other_size = dataclasses.replace(shared.offer, num_slots=3)
    folder = dataclasses.replace(shared.offer, path=str(tmp_path))
    assert [attach(offer) for offer in (other_secret, other_size, folder)] == [None] * 3
