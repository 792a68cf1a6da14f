"""Buffers return to the pool when nobody reads them, and never before."""

import asyncio

import pytest
import torch

from torchtitan.grpo.inference.client import BucketSpec
from torchtitan.grpo.weight_sync.connection import Bucket
from torchtitan.grpo.weight_sync.payloads import Gathered, Payloads


def gathered(version: int) -> Gathered:
    spec = BucketSpec(("w",), ("float32",), ((1,),))
    return Gathered(version, [Bucket(spec, torch.full((4,), version, dtype=torch.uint8))])


def test_buffers_are_free_only_when_superseded_and_unread():
    async def body():
        payloads = Payloads()
        first, second = gathered(1), gathered(2)
        await payloads.put(first)
        assert payloads.free_buffers() is None  # the newest may be wanted by a lane
        with payloads.reading(first):
            await payloads.put(second)
            assert payloads.free_buffers() is None  # a slow lane still sends it
        (buffer,) = payloads.free_buffers() or []
        assert buffer is first.buckets[0].payload
        assert payloads.free_buffers() is None  # handed out once

    asyncio.run(body())


def test_buffers_of_a_failed_push_are_not_used_again():
    """The broadcast that was given up may still read them."""

    async def body():
        payloads = Payloads()
        first = gathered(1)
        await payloads.put(first)
        with pytest.raises(RuntimeError), payloads.reading(first):
            raise RuntimeError("the server is gone")
        with payloads.reading(first):  # another lane, which succeeds
            pass
        await payloads.put(gathered(2))
        assert payloads.free_buffers() is None

    asyncio.run(body())


def test_a_lane_is_given_the_newest_version_and_waits_for_newer_ones():
    async def body():
        payloads = Payloads()
        assert await payloads.newer_than(-1, 0.01) is None
        waiting = asyncio.create_task(payloads.newer_than(2, 10))
        for version in (1, 2, 3):
            await payloads.put(gathered(version))
        newest = await waiting
        assert newest is not None
        assert newest.version == 3
        assert await payloads.newer_than(3, 0.01) is None

    asyncio.run(body())
