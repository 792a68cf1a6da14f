# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Slots that other processes read where they lie, and memory that is not what was offered."""

import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

from torchtitan.grpo.weight_sync.shared_slots import SharedSlots, attach
from torchtitan.grpo.weight_sync.snapshot import Snapshots

SHAPES = {"weight": (5, 3), "empty": (0, 4), "scalar": ()}
READ_WEIGHT = """
import pickle, sys
from torchtitan.grpo.weight_sync.shared_slots import attach
print(attach(pickle.loads(sys.stdin.buffer.read()))[1]["weight"].max().item())
"""


@pytest.fixture
def shared():
    made = SharedSlots(SHAPES, 2, torch.bfloat16)
    yield made
    made.close()


def test_what_is_written_into_a_slot_is_read_in_the_same_slot_elsewhere(shared):
    attached = attach(shared.offer)
    assert attached is not None
    for slot in range(2):
        shared.slots[slot]["weight"].fill_(slot + 1.0)
        shared.slots[slot]["scalar"].fill_(slot + 3.0)
    for slot, tensors in enumerate(attached):
        assert {name: tuple(t.shape) for name, t in tensors.items()} == SHAPES
        assert (tensors["weight"] == slot + 1.0).all()
        assert tensors["scalar"] == slot + 3.0


def test_another_process_reads_them_and_keeps_them_when_the_owner_closes(shared):
    shared.slots[1]["weight"].fill_(7.0)
    child = [sys.executable, "-c", READ_WEIGHT]
    read = subprocess.run(child, input=pickle.dumps(shared.offer), capture_output=True, timeout=120)
    assert read.stdout.decode().strip() == "7.0", read.stderr.decode()
    attached = attach(shared.offer)
    shared.close()
    assert attached is not None and (attached[1]["weight"] == 7.0).all()
    assert attach(shared.offer) is None


def test_another_file_under_the_same_path_is_not_taken_for_it(shared, tmp_path):
    other_secret = dataclasses.replace(shared.offer, secret=bytes(16))
    other_size = dataclasses.replace(shared.offer, num_slots=3)
    folder = dataclasses.replace(shared.offer, path=str(tmp_path))
    assert [attach(offer) for offer in (other_secret, other_size, folder)] == [None] * 3


def test_snapshots_are_copied_into_shared_slots(shared):
    parameters = {"weight": torch.randn(3, 5).T, "empty": torch.zeros(0, 4)}
    snapshots = Snapshots(parameters, 2, torch.float32, torch.device("cpu"), is_shared=True)
    assert snapshots.shared is not None
    attached = attach(snapshots.shared.offer)
    snapshots.copy_into(1)
    read = snapshots.read(1, 30.0)
    snapshots.close()
    assert attached is not None
    for tensors in (read, attached[1]):
        torch.testing.assert_close(dict(tensors), parameters, rtol=0, atol=0)
