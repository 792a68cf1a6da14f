# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gathers versions on their source ranks, in full and with Hugging Face names.

Gathering runs on background threads of every rank, one for each source to which the rank
contributes, so that sources do not wait for one another. Each thread has its own process group,
because two threads must not issue collectives on one communicator. What each rank sends is
decided once; see `plan.py`. If ranks write into their source's memory (see `slot_layout.py`), the
buckets in the slot are complete once all ranks have copied, except for parameters to be converted.

Gathering uses only the CPU and gloo: snapshots lie in host memory on every training device, and
NVIDIA does not guarantee progress if several NCCL communicators are used at the same time. FSDP uses
its own communicators while a version is gathered.
"""

import asyncio
import functools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.distributed as dist

from torchtitan.grpo.models.collect import Collector, agree_on_assembly, collecting_group
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.lora import AdapterMerge, lora_scale
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.network import boot_id
from torchtitan.grpo.system.rank_calls import operation
from torchtitan.grpo.weight_sync.payloads import Payload, PayloadPool
from torchtitan.grpo.weight_sync.plan import BucketPlan, SourceLimits, SourcePlan
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards, SnapshotSlots, plan_push
from torchtitan.grpo.weight_wire.adapter_names import is_adapter

_HOST = torch.device("cpu")
_POLL_SECONDS = 0.02
# Early changes are always small, and their share grows with them.
_JUDGED_VERSION, _SMALL_SHARE = 10, 0.25


def agree_on_push(
    parameters: Mapping[str, torch.Tensor],
    adapter: StateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    *,
    adapters_only: bool = False,
    max_sources: int = 0,
    contiguous: bool = False,
) -> PushPlan:
    """Decides what each rank sends, from its sharded ``parameters``; collective over all ranks."""
    limits = SourceLimits(max_sources, agree_on_hosts())
    return plan_push(
        agree_on_assembly(parameters, adapter), adapter, wire_dtype, bucket_bytes, limits,
        adapters_only=adapters_only, contiguous=contiguous,
    )  # fmt: skip


def agree_on_hosts() -> tuple[int, ...]:
    """Numbers the hosts from 0 and returns the number of each rank's host; collective over all ranks."""
    names: list[str | None] = [None] * dist.get_world_size()
    # The second part tells hosts apart that have the same name.
    dist.all_gather_object(names, f"{socket.gethostname()} {boot_id()}")
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(str(name), len(numbers)) for name in names)


class Gatherer:
    """Does one rank's part of gathering versions; all ranks must construct it at the same time."""

    def __init__(
        self,
        plan: PushPlan,
        slots: SnapshotSlots,
        adapter: StateDictAdapter,
        timeout_seconds: float,
    ) -> None:
        self._adapter, self._slots = adapter, slots
        rank = dist.get_rank()
        self._own = plan.source(rank)
        self._is_first = rank == plan.sources[0].rank
        self._layout = plan.layouts.get(rank)
        # Every rank must take part in the creation of every group, even if it is not a member.
        self._collectors: list[tuple[SourcePlan, Collector]] = []
        for source in plan.sources:
            group = collecting_group(source.members, "gloo", timeout_seconds, _HOST)
            if rank in source.members:
                buckets = [bucket.assemblies for bucket in source.buckets]
                writers = slots.writers(source.rank)
                collector = Collector(buckets, plan.wire_dtype, _HOST, group, source.rank, writers)
                self._collectors.append((source, collector))
        self._threads = ThreadPoolExecutor(
            max(1, len(self._collectors)), thread_name_prefix="weight-gather-source"
        )

    def gather(
        self, slot: int, shards: Mapping[str, torch.Tensor], payload: Payload | None
    ) -> None:
        """Gathers a version from all ranks' ``shards`` in the slot; a source rank fills its ``payload``."""
        assert (payload is not None) == (self._own is not None)
        gather_one = functools.partial(self._gather_one, slot, shards, payload)
        if len(self._collectors) == 1:  # another thread would have to wait for a core
            gather_one(*self._collectors[0])
            return
        gathering = [self._threads.submit(gather_one, *each) for each in self._collectors]
        wait(gathering)  # even if one fails, because the others still use the slot
        for each in gathering:
            each.result()

    def _gather_one(
        self,
        slot: int,
        shards: Mapping[str, torch.Tensor],
        payload: Payload | None,
        source: SourcePlan,
        collector: Collector,
    ) -> None:
        if source is not self._own:
            # The iteration sends this rank's shards. Nothing is received here.
            for _ in collector.collect(shards):
                raise AssertionError("only the source rank may receive shards")
            return
        assert payload is not None and self._layout is not None
        others = self._slots.shards_of_writers(slot)
        # Parameters that are not converted are assembled directly in their buckets.
        places = self._layout.wholes_in(payload.buffers)
        whole = collector.collect(shards, others=others, places=places)
        merges = []
        for index, plan in enumerate(source.buckets):
            merges.append(self._fill(plan, whole, payload.buffers[index]))
            payload.filled(index)
        for name, _ in whole:
            raise AssertionError(f"parameter {name} must be in a bucket, but is in none")
        if self._is_first and payload.version >= _JUDGED_VERSION:
            self._is_first = False  # it is said once
            _warn_of_rounding(merges, payload.version)

    def close(self) -> None:
        """Ends the threads. A thread that waits for another rank ends at its timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(
        self, plan: BucketPlan, whole: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor
    ) -> AdapterMerge:
        position = 0
        merge = AdapterMerge(lora_scale(self._adapter))
        for assembly in plan.assemblies:
            name, full = next(whole)
            assert name == assembly.name, (name, assembly.name)
            if is_adapter(name) and not plan.num_bytes_of[name]:
                merge.add(name, full)  # the adapter is sent as a part of its target
                continue
            begin = position
            for tensor in self._adapter.to_hf({name: full}).values():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                part = buffer[position : position + flat.numel()]
                if part.data_ptr() != flat.data_ptr():  # otherwise it was assembled in place
                    part.copy_(flat)
                position += flat.numel()
            if position > begin:
                merge.target(name, buffer[begin:position].view(full.dtype), assembly.shape)
        assert position == plan.num_bytes, (plan.spec.names, position)
        return merge


def _warn_of_rounding(merges: Sequence[AdapterMerge], version: int) -> None:
    meant = sum(merge.meant for merge in merges)
    share = sum(merge.arrived for merge in merges) / meant if meant else 1.0
    if share < _SMALL_SHARE:
        logger.warning(
            f"Servers get {max(share, 0.0):.0%} of what the adapters of version {version} change: added "
            "to the weights, the rest is lost in rounding to the dtype in which they travel. Set "
            "weight_sync.dtype and inference.dtype to 'float32', or raise optimizer.lr or lora.alpha."
        )


class Agent:
    """Carries out what the leader asks of each rank, in the event loop of the publisher's thread.

    The leader calls its own rank's agent directly, and those of other ranks over the channel.
    ``read_snapshot`` waits until a slot holds a version, and returns this rank's shards of it.
    Ranks that are no sources have no ``pool``.
    """

    def __init__(
        self,
        rank: int,
        gatherer: Gatherer,
        read_snapshot: Callable[[int, int], Shards],
        pool: PayloadPool | None,
    ) -> None:
        self.rank = rank
        self._gatherer, self._read_snapshot, self._pool = gatherer, read_snapshot, pool
        self._gathering = ThreadPoolExecutor(1, thread_name_prefix="weight-gather")
        # One thread, so that the tensors of a version are summed once, however many servers attest it.
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="weight-checksums")

    @operation
    async def wait_copied(self, slot: int, version: int) -> None:
        loop = asyncio.get_running_loop()
        with spans.span("weights", "snapshot", version=version):
            await loop.run_in_executor(self._gathering, self._read_snapshot, slot, version)

    @operation
    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        """Takes part in gathering a version. Source ranks keep the version until :meth:`drop`.

        If the slot ``is_held``, it is not written before the version is dropped, so that buckets can
        be sent from it. Otherwise, it may be written again once all ranks have returned.
        """
        payload = None
        if self._pool is not None:
            # The buffers are taken on the event loop, so that a sender that asks for a bucket of
            # the version after this call finds the version in the pool.
            payload = self._pool.take(version, slot if is_held else None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._gathering, self._gather, slot, version, payload)

    def _gather(self, slot: int, version: int, payload: Payload | None) -> None:
        try:
            with spans.span("weights", "gather", version=version):
                self._gatherer.gather(slot, self._read_snapshot(slot, version), payload)
        except BaseException as error:
            if payload is not None:
                payload.fail(f"{type(error).__name__}: {error}")
            raise

    @operation
    async def checksums(self, version: int) -> dict[str, int]:
        """Returns the checksums of the tensors that this source rank sends of a version it holds."""
        assert self._pool is not None, "only source ranks are asked"
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._summing, self._checksums, version)

    def _checksums(self, version: int) -> dict[str, int]:
        # Read here, because this thread continues if its caller is cancelled.
        assert self._pool is not None
        with self._pool.reading(version) as payload:
            return payload.checksums()

    @operation
    async def drop(self, version: int) -> None:
        """Drops a version, and returns when it is no longer read and its buffers are free."""
        if self._pool is None:
            return
        self._pool.drop(version)
        # A broadcast that was cancelled by its lane ends no later than the group's timeout.
        while self._pool.holds(version):
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        self._gatherer.close()
        self._gathering.shutdown(wait=False, cancel_futures=True)
        self._summing.shutdown(wait=False, cancel_futures=True)
