# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests which buckets staging receives, and which it refuses."""

from collections.abc import Iterator

import pytest
import torch

from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.staging import Staging, StagingError, StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

SECONDS = 10.0


class RecordingGroup:
    """A weight group in which every broadcast consists of zeros and arrives at once."""

    name = "group"

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def buffer_device(self, model_device: torch.device) -> torch.device:
        return model_device

    def receive(self, tensor: torch.Tensor) -> None:
        self.sizes.append(tensor.nbytes)
        tensor.zero_()

    def leave(self) -> None:
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
    with pytest.raises(StagingError, match="The second is wrong"):
        later.result(SECONDS)
    assert group.sizes == [4]
    with pytest.raises(StagingError, match="The second is wrong"):
        staging.collect(SECONDS)


def test_buckets_that_came_early_are_told_of_a_refusal(staging):
    group = RecordingGroup()
    early = staging.announce(bucket("b", 2), group, sequence=1)
    staging.refuse("The first is wrong.")
    with pytest.raises(StagingError, match="The first is wrong"):
        early.result(SECONDS)
    assert group.sizes == []


def test_what_came_damaged_was_received_and_so_is_what_follows(staging):
    group = RecordingGroup()
    first = staging.announce(bucket("a", 1, checksum=12345), group, sequence=0)
    with pytest.raises(StagingError, match="a must have checksum 12345"):
        first.result(SECONDS)
    second = staging.announce(bucket("b", 2), group, sequence=1)
    with pytest.raises(StagingError, match="a must have checksum 12345"):
        second.result(SECONDS)
    assert group.sizes == [4, 8]


def test_after_damage_buckets_that_overtake_one_another_still_wait_their_turn(staging):
    group = RecordingGroup()
    first = staging.announce(bucket("a", 1, checksum=12345), group, sequence=0)
    assert first.exception(SECONDS) is not None
    third = staging.announce(bucket("c", 3), group, sequence=2)
    second = staging.announce(bucket("b", 2), group, sequence=1)
    for future in (second, third):
        assert isinstance(future.exception(SECONDS), StagingError)
    assert group.sizes == [4, 8, 12]
