# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests lossless deltas between two versions of a bucket."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.weight_wire.sparse import WHOLE, apply, decode, delta_bytes, encode

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def receive(
    previous: torch.Tensor,
    payload: torch.Tensor,
    numels: list[int],
    num_changed: tuple[int, ...],
    itemsize: int,
) -> torch.Tensor:
    """Returns the receiver's tensors after the changes were written into them."""
    sizes = [numel * itemsize for numel in numels]
    held = [part.clone().view(DTYPES[itemsize]) for part in previous.split(sizes)]
    for tensor, changes in zip(held, decode(payload, numels, num_changed, itemsize), strict=True):
        apply(tensor, changes)
    return torch.cat([tensor.view(torch.uint8) for tensor in held])


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
    """Draws two versions of a bucket from all bits: NaNs, infinities and both zeros occur."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    numels = draw(st.lists(st.integers(0, 50), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = sum(numels) * itemsize
    previous = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    share = draw(st.sampled_from([0.0, 0.02, 0.2, 0.6, 1.0]))
    flips = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    flips *= torch.rand(size, generator=generator) < share
    return previous, previous ^ flips, numels, itemsize


@settings(deadline=None, max_examples=200)
@given(versions())
def test_what_arrives_is_bitwise_what_was_sent(case) -> None:
    previous, current, numels, itemsize = case
    payload, num_changed = encode(previous, current, numels, itemsize)
    assert payload.numel() == delta_bytes(numels, num_changed, itemsize) <= current.numel()
    held = receive(previous, payload, numels, num_changed, itemsize)
    assert torch.equal(held, current)


@settings(deadline=None, max_examples=50)
@given(versions(), st.integers(1, 7))
def test_the_place_of_a_payload_in_memory_does_not_matter(case, offset: int) -> None:
    previous, current, numels, itemsize = case

    def moved(octets: torch.Tensor) -> torch.Tensor:
        return torch.cat([octets.new_zeros(offset), octets])[offset:]

    payload, num_changed = encode(moved(previous), moved(current), numels, itemsize)
    held = receive(previous, moved(payload), numels, num_changed, itemsize)
    assert torch.equal(held, current)


def test_nan_and_the_sign_of_zero_are_changes_and_no_change() -> None:
    nan = float("nan")
    old = torch.tensor([0.0, nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    new = torch.tensor([-0.0, nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    payload, num_changed = encode(old.view(torch.uint8), new.view(torch.uint8), [8], 4)
    assert num_changed == (1,)
    assert payload.view(torch.int32).tolist() == [0, -(2**31)]


def test_a_tensor_comes_whole_where_its_changes_are_not_shorter() -> None:
    old, new = torch.zeros(8, dtype=torch.int16), torch.zeros(8, dtype=torch.int16)
    new[:3] = 1  # 3 x (4 + 2) bytes are more than 8 x 2
    both = old.view(torch.uint8), new.view(torch.uint8)
    assert encode(*both, [8], 2)[1] == (WHOLE,)
    assert encode(*both, [4, 4], 2)[1] == (WHOLE, 0)
    new[1:3] = 0
    assert encode(*both, [8], 2)[1] == (1,)


@pytest.mark.parametrize(
    ("octets", "num_changed", "message"),
    [
        ([0] * 5, 1, r"must have 6 bytes, got 5"),
        ([0] * 24, 4, r"0 to 3 elements, got 4"),
        ([0] * 6, -2, r"0 to 3 elements, got -2"),
        ([255] * 4 + [0] * 2, 1, r"indices must be in \[0, 3\)"),  # -1
        ([3, 0, 0, 0, 0, 0], 1, r"indices must be in \[0, 3\)"),
    ],
)
def test_a_delta_that_contradicts_itself_is_refused(octets, num_changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        decode(torch.tensor(octets, dtype=torch.uint8), [3], (num_changed,), 2)
