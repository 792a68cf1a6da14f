"""Buckets are read once they are filled, and buffers used again once nobody reads them."""

import asyncio
import threading

import pytest

from torchtitan.grpo.weight_sync.payloads import PayloadFailed, PayloadPool
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

SPECS = [
    BucketSpec(("a", "b"), ("float32", "float32"), ((1,), (2,))),
    BucketSpec(("c",), ("float32",), ((3,),)),
]


def new_pool() -> PayloadPool:
    return PayloadPool(SPECS, [12, 12], checksum=False)


async def test_a_bucket_can_be_read_while_later_ones_are_still_gathered():
    payload = new_pool().take(1)
    waiting = asyncio.create_task(payload.wait_filled(0, 10))
    later = asyncio.create_task(payload.wait_filled(1, 10))
    threading.Thread(target=payload.filled, args=(0,)).start()
    await waiting
    assert not later.done()
    assert payload.bucket(0).spec == SPECS[0]
    payload.filled(1)
    await later


async def test_what_will_never_be_gathered_fails_its_readers_with_the_reason():
    payload = new_pool().take(1)
    payload.filled(0)
    payload.fail("rank 3 is gone")
    await payload.wait_filled(0, 10)
    with pytest.raises(PayloadFailed, match=r"Bucket 1 of version 1 .* rank 3 is gone"):
        await payload.wait_filled(1, 10)
    with pytest.raises(PayloadFailed, match=r"it was not gathered within 0\.01 s"):
        await new_pool().take(2).wait_filled(0, 0.01)


async def test_buffers_are_used_again_only_when_dropped_and_read_by_nobody():
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
