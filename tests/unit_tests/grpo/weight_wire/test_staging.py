# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests which buckets staging receives, and which it refuses."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.staging import Staging, StagingPlace, UpdateError
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

SECONDS = 10.0


class RecordingGroup:
    """A weight group in which every broadcast consists of zeros and arrives at once."""

    name = "group"
    is_nccl = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def receive(self, tensor: torch.Tensor, *_: Any) -> None:
        self.sizes.append(tensor.nbytes)
        tensor.zero_()

    def begin_leave(self) -> None:
        """There is nothing to leave."""


def bucket(name: str, size: int, checksum: int | None = None) -> BucketSpec:
    checksums = None if checksum is None else (checksum,)
    return BucketSpec((name,), ("float32",), ((size,),), checksums)


@pytest.fixture
def staging() -> Iterator[Staging]:
    place = StagingPlace(torch.device("cpu"), lambda *_: torch.empty(0), lambda _, tensor: tensor)
    staging = Staging(place, BufferPool())
    yield staging
    staging.drop()


def test_a_refused_bucket_lets_none_be_received_in_its_place(staging):
    group = RecordingGroup()
    staging.announce(bucket("a", 1), group, sequence=0).result(SECONDS)
    staging.refuse("The second is wrong.")
    later = staging.announce(bucket("c", 3), group, sequence=2)
    with pytest.raises(UpdateError, match="The second is wrong"):
        later.result(SECONDS)
    assert group.sizes == [4]
    with pytest.raises(UpdateError, match="The second is wrong"):
        staging.collect(SECONDS)


def test_buckets_that_came_early_are_told_of_a_refusal(staging):
    group = RecordingGroup()
    early = staging.announce(bucket("b", 2), group, sequence=1)
    staging.refuse("The first is wrong.")
    with pytest.raises(UpdateError, match="The first is wrong"):
        early.result(SECONDS)
    assert group.sizes == []


def test_a_bucket_for_which_there_is_no_memory_lets_none_be_received_in_its_place(
    staging, monkeypatch
):
    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("there is no memory")

    monkeypatch.setattr(staging._buffers, "take", refuse)
    group = RecordingGroup()
    first = staging.announce(bucket("a", 1), group, sequence=0)
    assert isinstance(first.exception(SECONDS), UpdateError)
    monkeypatch.undo()
    second = staging.announce(bucket("b", 2), group, sequence=1)
    with pytest.raises(UpdateError, match="there is no memory"):
        second.result(SECONDS)
    assert group.sizes == []


def test_buckets_that_overtook_one_another_are_received_in_their_order(staging):
    group = RecordingGroup()
    early = [staging.announce(bucket(n, i), group, sequence=i) for i, n in ((2, "c"), (1, "b"))]
    with pytest.raises(ValueError, match="announced twice"):
        staging.announce(bucket("d", 9), group, sequence=2)
    with pytest.raises(ValueError, match="sequence must be the number"):
        staging.announce(bucket("d", 9), group, sequence=None)
    staging.announce(bucket("a", 5), group, sequence=0)
    for future in early:
        future.result(SECONDS)
    assert group.sizes == [20, 4, 8]


def test_after_damage_buckets_that_overtake_one_another_still_wait_their_turn(staging):
    group = RecordingGroup()
    first = staging.announce(bucket("a", 1, checksum=12345), group, sequence=0)
    assert first.exception(SECONDS) is not None
    third = staging.announce(bucket("c", 3), group, sequence=2)
    second = staging.announce(bucket("b", 2), group, sequence=1)
    for future in (second, third):
        assert isinstance(future.exception(SECONDS), UpdateError)
    assert group.sizes == [4, 8, 12]


class SlowGroup(RecordingGroup):
    """A weight group whose broadcasts arrive when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.arrives = threading.Event()

    def receive(self, tensor: torch.Tensor, *_: Any) -> None:
        assert self.arrives.wait(SECONDS)
        super().receive(tensor)


def test_a_group_that_waits_for_its_source_holds_up_no_other(staging):
    slow: Any = SlowGroup("slow")
    quick: Any = RecordingGroup()
    first = staging.announce(bucket("a", 4), slow, sequence=0)
    second = staging.announce(bucket("b", 4), quick, sequence=0)
    second.result(SECONDS)
    assert not first.done()
    slow.arrives.set()
    first.result(SECONDS)
    assert sorted(staging.collect(SECONDS)) == ["a", "b"]


class OrderedGroup(SlowGroup):
    """A group over NCCL: its broadcasts are launched at once, and arrive later."""

    is_nccl = True
    timeout_seconds = SECONDS
    launched: list[str]

    def receive(self, tensor: torch.Tensor, device: torch.device, turn: Any) -> None:
        with turn:
            self.launched.append(self.name)
        super().receive(tensor)


def test_broadcasts_over_nccl_are_launched_as_announced_and_do_not_wait_for_one_another(staging):
    OrderedGroup.launched = []
    groups: list[Any] = [OrderedGroup(name) for name in ("a", "b", "c")]
    arrived = [
        staging.announce(bucket(f"{group.name}{i}", 4), group, sequence=i)
        for i in range(2)
        for group in groups
    ]
    groups[2].arrives.set()
    arrived[2].result(SECONDS)  # although a and b have not arrived
    assert OrderedGroup.launched == ["a", "b", "c"]
    groups[1].arrives.set()
    arrived[1].result(SECONDS)
    groups[0].arrives.set()
    for future in arrived:
        future.result(SECONDS)
    assert OrderedGroup.launched == ["a", "b", "c"] * 2


def test_a_bucket_that_is_not_received_holds_up_no_launch(staging):
    OrderedGroup.launched = []
    groups: list[Any] = [OrderedGroup(name) for name in ("a", "b")]
    for group in groups:
        group.arrives.set()
    staging.announce(bucket("a", 4, checksum=1), groups[0], sequence=0)
    failed = staging.announce(bucket("b", 4), groups[1], sequence=0)
    assert failed.exception(SECONDS) is None or isinstance(failed.exception(), UpdateError)
    with pytest.raises(UpdateError, match="checksum"):
        staging.collect(SECONDS)
    assert OrderedGroup.launched == ["a", "b"]
