"""Buckets are read once they are filled, and buffers used again once nobody reads them."""

import asyncio
import threading

import pytest

from torchtitan.grpo.weight_sync.payloads import (
    PayloadFailed,
    PayloadPool,
)
from torchtitan.grpo.weight_wire.buckets import bucket_bytes, tensor_bytes
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

SPECS = [
    BucketSpec(("a", "b"), ("float32", "float32"), ((1,), (2,))),
    BucketSpec(("c",), ("float32",), ((3,),)),
]


def new_pool(checksum: bool = False) -> PayloadPool:
    return PayloadPool(SPECS, [12, 12], checksum)


def test_a_bucket_can_be_read_while_later_ones_are_still_gathered():
    async def body():
        payload = new_pool().take(1)
        waiting = asyncio.create_task(payload.wait_filled(0, 10))
        later = asyncio.create_task(payload.wait_filled(1, 10))
        threading.Thread(target=payload.filled, args=(0,)).start()
        await waiting
        assert not later.done()
        assert payload.bucket(0).spec == SPECS[0]
        payload.filled(1)
        await later

    asyncio.run(body())


def test_what_will_never_be_gathered_fails_its_readers_with_the_reason():
    async def body():
        payload = new_pool().take(1)
        payload.filled(0)
        payload.fail("rank 3 is gone")
        await payload.wait_filled(0, 10)
        with pytest.raises(PayloadFailed, match=r"Bucket 1 of version 1 .* rank 3 is gone"):
            await payload.wait_filled(1, 10)
        with pytest.raises(PayloadFailed, match=r"it was not gathered within 0\.01 s"):
            await new_pool().take(2).wait_filled(0, 0.01)

    asyncio.run(body())


def test_buffers_are_used_again_only_when_dropped_and_read_by_nobody():
    async def body():
        pool = new_pool()
        first = pool.take(1)
        with pool.reading(1):
            pool.drop(1)
            assert pool.holds(1)  # a lane that was given up still sends it
            with pytest.raises(PayloadFailed, match="no longer held"), pool.reading(1):
                pass
            assert pool.take(2).buffers is not first.buffers
        assert not pool.holds(1)
        assert pool.take(3).buffers is first.buffers
        assert pool.take(4).buffers is not first.buffers  # handed out once

    asyncio.run(body())


def test_checksums_are_of_each_tensor():
    async def body():
        pool = new_pool(checksum=True)
        payload = pool.take(1)
        for buffer in payload.buffers:
            buffer.zero_()
        payload.filled(0)
        before = payload.bucket(0).spec.checksums
        assert before is not None and len(before) == 2
        other = pool.take(2)
        other.buffers[0].zero_()[5] = 1  # in the second tensor
        other.filled(0)
        after = other.bucket(0).spec.checksums
        assert after is not None and after[0] == before[0] and after[1] != before[1]

    asyncio.run(body())


def test_a_delta_counts_as_long_as_it_travels():
    from dataclasses import replace

    assert tensor_bytes(SPECS[0].dtypes, SPECS[0].shapes) == [4, 8]
    assert bucket_bytes(SPECS[0]) == 12
    delta = replace(SPECS[0], num_changed=(0, -1), base_version=3)
    assert bucket_bytes(delta) == 8
