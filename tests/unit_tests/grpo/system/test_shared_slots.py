# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Slots that other processes write where they lie, and memory that is not what was offered."""

import dataclasses
import pickle
import resource
import subprocess
import sys

import pytest
import torch
from light import LIGHT

from torchtitan.grpo.system.shared_slots import SharedSlots, attach, own_memory

SLOT_BYTES = 3 * 64
ATTACHED = """
import pickle, sys
from torchtitan.grpo.system.shared_slots import attach
slots = attach(pickle.loads(sys.stdin.buffer.read()))
print(slots[0].max().item())
slots[1].fill_(9)
"""


@pytest.fixture
def shared():
    made = SharedSlots(SLOT_BYTES, 2)
    yield made
    made.close()


def test_slots_are_apart_and_the_same_for_all_who_have_them_mapped(shared):
    attached = attach(shared.offer)
    assert attached is not None
    for slot in range(2):
        shared.slots[slot].fill_(slot + 1)
    assert [(len(slot), slot.unique().tolist()) for slot in attached] == [
        (SLOT_BYTES, [1]),
        (SLOT_BYTES, [2]),
    ]


def test_another_process_reads_and_writes_them(shared):
    shared.slots[0].fill_(7)
    child = [sys.executable, "-c", LIGHT + ATTACHED]
    done = subprocess.run(child, input=pickle.dumps(shared.offer), capture_output=True, timeout=120)
    assert done.stdout.decode().strip() == "7", done.stderr.decode()
    assert shared.slots[1].unique().tolist() == [9]


@pytest.mark.parametrize("whose", ["owner's", "other's", "private"])
def test_the_first_copy_into_a_slot_finds_every_page_in_place(whose):
    num_bytes = 64 * 2**20
    shared = SharedSlots(num_bytes, 1)
    try:
        attached = attach(shared.offer)
        assert attached is not None
        private = own_memory([num_bytes], torch.uint8)
        slot = {"owner's": shared.slots[0], "other's": attached[0], "private": private}[whose]
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        slot.fill_(1)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    finally:
        shared.close()
    # A page is at most 2 MiB, and some faults are the interpreter's.
    assert faults < num_bytes / 2**22


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
