# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests the checksum of a tensor's bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.weight_wire.checksum import tensor_checksum

ROW_BYTES = 4 * 2**15


def octets(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


SIZES = st.one_of(
    st.integers(1, 40),
    st.sampled_from([ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 3, 3 * ROW_BYTES + 4]),
)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.data())
def test_a_changed_byte_changes_it(num_bytes: int, data: st.DataObject) -> None:
    whole = octets(num_bytes)
    damaged = whole.clone()
    damaged[data.draw(st.integers(0, num_bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert tensor_checksum(damaged) != tensor_checksum(whole)


@settings(deadline=None, max_examples=60)
@given(SIZES.filter(lambda n: n >= 8), st.data())
def test_two_unequal_words_swapped_change_it(num_bytes: int, data: st.DataObject) -> None:
    whole = octets(num_bytes // 4 * 4).view(torch.int32)
    one, other = (data.draw(st.integers(0, whole.numel() - 1)) for _ in range(2))
    swapped = whole.clone()
    swapped[one], swapped[other] = whole[other], whole[one]
    same = bool(whole[one] == whole[other])
    assert (tensor_checksum(swapped) == tensor_checksum(whole)) == same


def test_words_that_differ_in_the_top_bit_alone_are_told_apart_across_rows() -> None:
    # The hardest case of the proof: 31 factors of two, times as many as positions allow.
    whole = torch.zeros(2**16 * 3, dtype=torch.int32)
    for one, other in ((0, 2**15), (0, 2**17), (1, 2**17 + 1), (5, 5 + 2**14)):
        first, second = whole.clone(), whole.clone()
        first[one] = second[other] = -(2**31)
        assert tensor_checksum(first) != tensor_checksum(second)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.data(), st.booleans())
def test_a_truncation_changes_it(num_bytes: int, data: st.DataObject, zeros: bool) -> None:
    whole = torch.zeros(num_bytes, dtype=torch.uint8) if zeros else octets(num_bytes)
    shorter = whole[: data.draw(st.integers(0, num_bytes - 1))]
    assert tensor_checksum(shorter) != tensor_checksum(whole)


@pytest.mark.parametrize("num_bytes", [0, 4 * 5, 4 * ROW_BYTES])
def test_it_is_of_the_bytes_whatever_the_dtype_shape_and_place(num_bytes: int) -> None:
    data = octets(num_bytes)
    expected = tensor_checksum(data)
    assert 0 <= expected < 2**64
    assert tensor_checksum(data.view(torch.float32)) == expected
    assert tensor_checksum(data.view(torch.bfloat16).view(2, -1)) == expected
    elsewhere = torch.empty(num_bytes + 1, dtype=torch.uint8)[1:]  # misaligned
    assert tensor_checksum(elsewhere.copy_(data)) == expected


def test_its_value_is_part_of_the_protocol() -> None:
    # Trainer and servers may run different releases: the definition, in plain integers.
    data = octets(3 * ROW_BYTES + 7)
    words = torch.cat([data, data.new_zeros(1)]).view(torch.int32).tolist()

    def scattered(index: int) -> int:
        return index * (2 * index + 1) * 0x9E3779B97F4A7C15

    total = 0xD6E8FEB86659FD93 * data.numel()
    for i, word in enumerate(words):
        row, column = divmod(i, 2**15)
        total += word * (2 * scattered(column + 1) + 1) * (2**16 * scattered(row + 1) + 1)
    assert tensor_checksum(data) == total % 2**64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_the_same_on_a_gpu() -> None:
    data = octets(300 * ROW_BYTES + 5)
    assert tensor_checksum(data.cuda()) == tensor_checksum(data)
