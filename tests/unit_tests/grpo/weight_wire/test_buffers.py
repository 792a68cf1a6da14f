# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests which receive buffers are reused."""

import torch

from torchtitan.grpo.weight_wire.buffers import BufferPool, storage_of

CPU = torch.device("cpu")


def receive(pool: BufferPool) -> list[torch.Tensor]:
    return [pool.take(64, CPU), pool.take(32, CPU)]


def test_a_buffer_that_is_served_is_never_lent_and_the_one_before_is() -> None:
    pool, served = BufferPool(), []
    seen: list[set[int]] = []
    for _ in range(6):
        buffers = receive(pool)
        assert not {storage_of(b) for b in buffers} & {storage_of(b) for b in served}
        served = [buffer[4:].view(torch.float32) for buffer in buffers]  # views, as tensors are
        pool.settle(served)
        seen.append({storage_of(tensor) for tensor in served})
    # Two versions take turns: nothing is allocated any more.
    assert seen[2] == seen[4] != seen[3] == seen[5]


def test_a_version_that_changes_in_part_keeps_the_rest_of_the_old_one() -> None:
    pool = BufferPool()
    whole = receive(pool)
    pool.settle(whole)
    new = pool.take(32, CPU)
    pool.settle([whole[0], new])
    again = receive(pool)
    assert storage_of(again[0]) not in {storage_of(whole[0]), storage_of(new)}
    assert storage_of(again[1]) == storage_of(whole[1])


def test_a_buffer_given_back_is_lent_again_within_the_update() -> None:
    pool = BufferPool()
    first = pool.take(64, CPU)
    pool.give_back(first)
    assert pool.take(64, CPU) is first


def test_buffers_of_a_dropped_update_are_not_lent_again() -> None:
    pool = BufferPool()
    dropped = receive(pool)  # something may still write to them
    pool.forget()
    addresses = {storage_of(buffer) for buffer in dropped}
    assert not addresses & {storage_of(buffer) for buffer in receive(pool)}


def test_buffers_of_sizes_that_are_no_longer_sent_are_freed() -> None:
    pool = BufferPool()
    pool.settle([])
    pool.take(1024, CPU)
    pool.settle([])
    for _ in range(2):
        receive(pool)
        pool.settle([])
    assert sorted(buffer.numel() for buffer in pool._free) == [32, 64]
