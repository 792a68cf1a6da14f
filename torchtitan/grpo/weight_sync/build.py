# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the weight push from the configuration."""

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.config import Inference, WeightSync
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import IDLE_SECONDS, make_client
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.lora import PeftStateDictAdapter
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.rank_calls import remote
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.attestation import (
    Attestation,
    Probes,
    SentTensors,
    attested_tokens,
    tolerances_of,
)
from torchtitan.grpo.weight_sync.gather import Agent, Gatherer, agree_on_push
from torchtitan.grpo.weight_sync.lane import Listeners
from torchtitan.grpo.weight_sync.leader import Leader, LeaderParts, max_alive
from torchtitan.grpo.weight_sync.memory_plan import (
    NUM_SLOTS,
    adapter_of_push,
    memory_of,
    wire_dtype,
)
from torchtitan.grpo.weight_sync.payloads import PayloadPool
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards, SnapshotSlots
from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions
from torchtitan.grpo.weight_sync.snapshot import Snapshots
from torchtitan.grpo.weight_sync.transports.disk_transport import DiskTransport
from torchtitan.grpo.weight_sync.transports.group_end import GroupSettings
from torchtitan.grpo.weight_sync.transports.group_transport import GroupTransport
from torchtitan.grpo.weight_sync.transports.interface import Sender, Transport
from torchtitan.grpo.weight_wire.version_files import VersionDirectories


def build_publisher(
    config: JobConfig, model_parts: list[nn.Module], adapter: StateDictAdapter, device: torch.device,
    channel: RankChannel, link: RolloutLink | None, servers: list[ServerInfo], vocab_size: int,
) -> WeightPublisher:  # fmt: skip
    """Builds one rank's publisher; collective over all ranks.

    Only rank 0, which leads, has a ``link`` to the rollout process, and ``servers`` to push to.
    Probe tokens are drawn from ``vocab_size``.
    """
    sync = config.weight_sync
    parameters = dict(named_parameters(model_parts))
    on_gpu = device.type == "cuda"
    adapter = adapter_of_push(config, adapter)
    adapters_only = isinstance(adapter, PeftStateDictAdapter)
    plan = agree_on_push(
        parameters, adapter, wire_dtype(config), sync.bucket_bytes,
        adapters_only=adapters_only, max_sources=sync.max_sources, contiguous=on_gpu,
    )  # fmt: skip
    make_transport = _make_disk_transport if sync.transport == "disk" else _make_group_transport
    transport: Transport[Any] = make_transport(config, plan, device)
    agreed = [max_alive(sync, len(servers))]  # servers that join later are not counted
    dist.broadcast_object_list(agreed, src=0)
    (max_held,) = agreed
    if link is not None:  # logged before the memory is allocated
        memory = memory_of(plan, sync, max_held, len(servers)).describe(on_gpu=on_gpu)
        logger.info(f"Weight sync: {plan.wire_dtype} {transport.describe()}; {'; '.join(memory)}.")
    memory_slots = SnapshotSlots(plan, NUM_SLOTS + max_held, pinned=on_gpu)
    snapshots = Snapshots(parameters, memory_slots.shards, device)
    gatherer = Gatherer(plan, memory_slots, adapter, _patience_seconds(sync))
    slots = SlotVersions() if link is None else SlotTable(NUM_SLOTS, max_held)

    def read(slot: int, version: int) -> Shards:
        slots.wait_filled(slot, version, _patience_seconds(sync))
        return snapshots.read(slot)

    pool = _make_pool(sync, plan, memory_slots)
    agent = Agent(dist.get_rank(), gatherer, read, pool)
    sender = transport.make_sender(agent.rank, pool) if pool is not None else None
    probes, make_leader = Probes(), None
    if link is not None:
        assert isinstance(slots, SlotTable)
        parts = _leader_parts(config, plan, agent, sender, channel, transport)
        # A server adds adapters to what it serves.
        sent = None if adapters_only else _sent_tensors(plan, parts.sources)
        tokens = attested_tokens(config, vocab_size)
        attestation = _attestation(sync, plan, tokens, probes, sent)
        make_leader = functools.partial(
            _make_leader, sync, slots, parts, attestation, link, servers
        )
    own = [agent] if sender is None else [sender, agent]
    return WeightPublisher(
        snapshots=snapshots, slots=slots, probes=probes, attest_every=sync.attest_every,
        make_leader=make_leader, follow=lambda: channel.serve(own),
    )  # fmt: skip


def client_for(inference: Inference, server: ServerInfo) -> InferenceClient:
    return make_client(
        server.kind, server.url, api_key=inference.api_key, admin_key=inference.admin_key,
        control_timeout_seconds=inference.control_timeout_seconds, idle_seconds=IDLE_SECONDS,
    )  # fmt: skip


def _patience_seconds(sync: WeightSync) -> float:
    return 10 * sync.timeout_seconds + 600


def _make_pool(sync: WeightSync, plan: PushPlan, slots: SnapshotSlots) -> PayloadPool | None:
    own = plan.source(dist.get_rank())
    if own is None:
        return None
    specs = [bucket.spec for bucket in own.buckets]
    sizes = [bucket.num_bytes for bucket in own.buckets]
    return PayloadPool(specs, sizes, sync.checksum, slots.buckets)


def _leader_parts(
    config: JobConfig, plan: PushPlan, agent: Agent, sender: Sender | None, channel: RankChannel,
    transport: Transport[Any],
) -> LeaderParts:  # fmt: skip
    # A call must not end before the timeouts that the called methods apply themselves.
    timeout_seconds = 2 * _patience_seconds(config.weight_sync)

    def on_rank(interface: type, own: Any, rank: int) -> Any:
        return own if rank == agent.rank else remote(interface, channel.call, rank, timeout_seconds)

    source_ranks = [source.rank for source in plan.sources]
    agents = [on_rank(Agent, agent, rank) for rank in range(dist.get_world_size())]
    return LeaderParts(
        agents=agents, sources=[agents[rank] for rank in source_ranks],
        senders=[on_rank(transport.sender_type, sender, rank) for rank in source_ranks],
        own=[agent] if sender is None else [sender, agent], transport=transport,
        make_client=lambda server: client_for(config.inference, server),
    )  # fmt: skip


def _sent_tensors(plan: PushPlan, sources: Sequence[Agent]) -> SentTensors:
    async def checksums(version: int) -> dict[str, int]:
        parts = await asyncio.gather(*(source.checksums(version) for source in sources))
        return {name: checksum for part in parts for name, checksum in part.items()}

    return SentTensors(str(plan.wire_dtype).removeprefix("torch."), checksums)


def _attestation(
    sync: WeightSync, plan: PushPlan, tokens: list[int], probes: Probes, sent: SentTensors | None
) -> Attestation:
    tolerances = tolerances_of(plan.wire_dtype)
    return Attestation(sync.attest_every, tokens, probes, tolerances, sync.timeout_seconds, sent)


def _make_leader(
    sync: WeightSync, slots: SlotTable, parts: LeaderParts, attestation: Attestation, link: RolloutLink,
    servers: Sequence[ServerInfo], on_change: Callable[[], None],
) -> Leader:  # fmt: skip
    listeners = Listeners(on_change, link.notify_version, link.notify_lost, link.notify_asleep)
    return Leader(slots, parts, sync, attestation, listeners, servers, link.watch.poll)


def _make_group_transport(
    config: JobConfig, plan: PushPlan, device: torch.device
) -> GroupTransport:
    sync = config.weight_sync
    assert sync.transport != "disk"
    # The configured address belongs to the host of rank 0. Sources on other hosts find their own.
    is_on_first_host = dist.get_rank() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = GroupSettings(
        master_address=sync.master_address if is_on_first_host else "auto", transport=sync.transport,
        timeout_seconds=sync.timeout_seconds, device=device, deltas=sync.delta,
        largest_bucket=max(b.num_bytes for source in plan.sources for b in source.buckets),
    )  # fmt: skip
    return GroupTransport(plan, settings)


def _make_disk_transport(config: JobConfig, plan: PushPlan, device: torch.device) -> DiskTransport:
    sync = config.weight_sync
    assert sync.disk_path is not None
    root, model = Path(sync.disk_path), Path(config.model.hf_assets_path)
    return DiskTransport(plan, lambda: VersionDirectories(root, model), sync.timeout_seconds)
