# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a source rank does for the leader: what it holds, for how long, and as changes; its buckets."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.grpo.weight_sync.gather import Agent
from torchtitan.grpo.weight_sync.payloads import Payload, PayloadFailed, PayloadPool
from torchtitan.grpo.weight_sync.transports import disk_transport
from torchtitan.grpo.weight_sync.transports.disk_transport import DiskSender
from torchtitan.grpo.weight_sync.transports.group_end import GroupSettings
from torchtitan.grpo.weight_sync.transports.group_transport import GroupSender
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

CPU = torch.device("cpu")
NUMEL = 1000
SPECS = [BucketSpec((name,), ("float32",), ((NUMEL,),)) for name in ("a", "b")]


class FillingGatherer:
    """Fills buckets with what the snapshot holds: one rank gathers nothing from others."""

    def gather(self, slot: int, shards: dict[str, torch.Tensor], payload: Payload) -> None:
        for index, spec in enumerate(SPECS):
            if shards[spec.names[0]].isnan().any():
                raise RuntimeError("rank 3 is gone")
            payload.buffers[index].copy_(shards[spec.names[0]].view(torch.uint8))
            payload.filled(index)

    def close(self) -> None:
        """There is no thread to end."""


def snapshot(version: int) -> dict[str, torch.Tensor]:
    """An element of each tensor differs from one version to the next."""
    tensors = {name: torch.zeros(NUMEL) for name in ("a", "b")}
    for tensor in tensors.values():
        tensor[: version + 1] = torch.arange(1.0, version + 2)
    return tensors


def make_rank_parts(
    read: Any = lambda slot, version: snapshot(version),
) -> tuple[Agent, GroupSender, DiskSender]:
    """An agent and the senders of both transports, of one source rank."""
    gatherer: Any = FillingGatherer()
    pool = PayloadPool(SPECS, [4 * NUMEL] * 2, checksum=True)
    group = GroupSender(0, pool, GroupSettings("auto", "host", 5.0, CPU))
    return Agent(0, gatherer, read, pool), group, DiskSender(0, pool, 5.0)


async def test_a_bucket_comes_whole_or_as_changes_to_an_older_version():
    agent, sender, _ = make_rank_parts()
    for version in (3, 4):
        await agent.gather(0, version, False)
    whole = await sender.prepare(4, 1, None)
    assert (whole.names, whole.num_changed, whole.base_version) == (("b",), None, None)
    assert whole.checksums is not None
    delta = await sender.prepare(4, 1, 3)
    assert (delta.num_changed, delta.base_version) == ((1,), 3)
    # Of the whole tensor, once the changes are in it.
    assert delta.checksums == whole.checksums
    await agent.close()
    await sender.close()


async def test_a_version_is_summed_up_by_tensor_while_it_is_held():
    agent, _, _ = make_rank_parts()
    await agent.gather(0, 3, False)
    expected = {name: tensor_checksum(tensor) for name, tensor in snapshot(3).items()}
    assert await agent.checksums(3) == expected
    await agent.drop(3)
    with pytest.raises(PayloadFailed, match="no longer held"):
        await agent.checksums(3)
    await agent.close()


async def test_a_version_is_sent_from_its_slot_only_while_that_is_held():
    in_slots = [[torch.zeros(4 * NUMEL, dtype=torch.uint8) for _ in SPECS] for _ in range(2)]

    pool = PayloadPool(SPECS, [4 * NUMEL] * 2, False, in_slots.__getitem__)
    gatherer: Any = FillingGatherer()
    agent = Agent(0, gatherer, lambda slot, version: snapshot(version), pool)
    await agent.gather(1, 3, True)
    await agent.gather(0, 4, False)
    with pool.reading(3) as held, pool.reading(4) as copied:
        assert held.buffers is in_slots[1]
        assert copied.buffers is not in_slots[0]
    await agent.close()


async def test_what_was_dropped_or_could_not_be_gathered_says_so():
    def read(slot: int, version: int) -> dict[str, torch.Tensor]:
        tensors = snapshot(version)
        if version == 2:
            tensors["b"][7] = float("nan")
        return tensors

    agent, sender, _ = make_rank_parts(read)
    await agent.gather(0, 1, False)
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        await agent.gather(0, 2, False)
    assert (await sender.prepare(2, 0, None)).names == ("a",)
    with pytest.raises(PayloadFailed, match=r"Bucket 1 .* rank 3 is gone"):
        await sender.prepare(2, 1, None)
    await agent.drop(1)
    with pytest.raises(PayloadFailed, match="Version 1 is no longer held"):
        await sender.prepare(1, 0, None)
    with pytest.raises(RuntimeError, match="must open a group with http://server before"):
        await sender.send("http://server", 2, 0, None)
    await sender.leave("http://server")
    await agent.close()
    await sender.close()


async def test_a_version_that_is_being_written_keeps_its_buffers_though_nobody_waits(
    monkeypatch, tmp_path
):
    begun, may_end = threading.Event(), threading.Event()
    write_part = disk_transport.write_part

    def slow_write(directory: Path, rank: int, buckets: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        write_part(directory, rank, buckets)

    monkeypatch.setattr(disk_transport, "write_part", slow_write)

    agent, _, sender = make_rank_parts()
    await agent.gather(0, 1, False)
    writing = asyncio.create_task(sender.write(1, str(tmp_path)))
    await asyncio.to_thread(begun.wait, 30)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    dropping = asyncio.create_task(agent.drop(1))
    await asyncio.wait({dropping}, timeout=0.1)
    assert not dropping.done(), "another version would be written into the buffers"
    may_end.set()
    await dropping
    assert (tmp_path / "model-rank00000.safetensors").is_file()
    await agent.close()
    await sender.close()


PAIR = [
    BucketSpec(("a", "b"), ("float32", "float32"), ((1,), (2,))),
    BucketSpec(("c",), ("float32",), ((3,),)),
]


def new_pool() -> PayloadPool:
    return PayloadPool(PAIR, [12, 12], checksum=False)


async def test_a_bucket_can_be_read_while_later_ones_are_still_gathered():
    payload = new_pool().take(1)
    waiting = asyncio.create_task(payload.wait_filled(0, 10))
    later = asyncio.create_task(payload.wait_filled(1, 10))
    threading.Thread(target=payload.filled, args=(0,)).start()
    await waiting
    assert not later.done()
    assert payload.bucket(0).spec == PAIR[0]
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
