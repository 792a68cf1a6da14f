# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Puts the weight push together from the configuration."""

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from torchtitan.grpo.config import Inference, WeightSync
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.system.device import default_backend, gpus_for_servers
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.agent import LocalAgent
from torchtitan.grpo.weight_sync.channel import (
    Address,
    LeaderChannel,
    agents_of_all_ranks,
    serve_agent,
)
from torchtitan.grpo.weight_sync.connection import Connection, DiskConnection, GroupConnection
from torchtitan.grpo.weight_sync.disk import VersionDirectories
from torchtitan.grpo.weight_sync.disk_versions import DiskVersions
from torchtitan.grpo.weight_sync.gather import Gatherer, agree_on_push
from torchtitan.grpo.weight_sync.group_end import GroupSettings
from torchtitan.grpo.weight_sync.lane import Attestation, LaneSettings, Listeners
from torchtitan.grpo.weight_sync.leader import Leader, LeaderParts, max_alive
from torchtitan.grpo.weight_sync.payloads import PayloadPool
from torchtitan.grpo.weight_sync.probe import Probes, probe_tokens
from torchtitan.grpo.weight_sync.publisher import FilledSlots, WeightPublisher, read_snapshot
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_sync.slot_memory import RankSlots, make_slots
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots, device_slots

_PROBE_LENGTH = 48
# A push makes many requests in a row, and connecting costs as much as they do. Servers keep
# idle connections for 5 s (uvicorn, of vLLM and SGLang) and longer.
_IDLE_SECONDS = 1.0
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}


def build_publisher(
    config: JobConfig,
    model_parts: list[nn.Module],
    adapter: BaseStateDictAdapter,
    device: torch.device,
    link: RolloutLink | None,
    servers: list[ServerInfo],
    vocab_size: int,
) -> WeightPublisher:
    """Builds one rank's publisher; collective over all ranks.

    Args:
        link: On rank 0, which leads; None elsewhere.
        servers: On rank 0, the servers to push to.
        vocab_size: Ids below it may be probed.
    """
    sync = config.weight_sync
    wire_dtype = TORCH_DTYPE_MAP[
        config.training.mixed_precision_param if sync.dtype == "auto" else sync.dtype
    ]
    backend = weight_backend(config, device.type)
    parameters = dict(named_parameters(model_parts))
    plan = agree_on_push(parameters, adapter, wire_dtype, sync.bucket_bytes)
    max_held = _agree_on_held(sync, device, len(servers))
    if link is not None:  # said before the memory is taken
        how = f"{wire_dtype} over {backend}"
        logger.info(f"Weight sync: {how}; {_describe_memory(sync, plan, max_held, len(servers))}")
    slots, slot_device = _make_slots(sync, plan, parameters, device, max_held)
    snapshots = Snapshots(parameters, slots.shards, device)
    gatherer = Gatherer(
        plan,
        slots,
        adapter,
        backend=default_backend(slot_device.type),
        timeout_seconds=_patience_seconds(sync),
        device=slot_device,
    )
    # The setting is an address of rank 0's host; sources on others find their own.
    is_on_first_host = dist.get_rank() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = GroupSettings(
        master_address=sync.master_address if is_on_first_host else "auto",
        backend=backend,
        timeout_seconds=sync.timeout_seconds,
        device=device if backend == "nccl" else torch.device("cpu"),
        deltas=sync.delta,
    )
    filled, probes = FilledSlots(), Probes()
    agent = _own_agent(sync, gatherer, slots, snapshots, filled, settings)
    channel, address = _channel(sync)
    table = SlotTable(sync.num_slots, max_held)
    make_leader = None
    if link is not None:
        attestation = Attestation(
            every=sync.attest_every,
            tokens=attested_tokens(config, vocab_size),
            probes=probes,
            tolerance=sync.attest_tolerance or _TOLERANCES[wire_dtype],
            timeout_seconds=sync.timeout_seconds,
        )
        make_leader = functools.partial(
            _make_leader, config, agent, channel, plan, table, attestation, link, servers
        )
    return WeightPublisher(
        snapshots=snapshots,
        filled=filled,
        slots=table,
        probes=probes,
        attest_every=sync.attest_every,
        make_leader=make_leader,
        follow=lambda: serve_agent(agent, address),
    )


def attested_tokens(config: JobConfig, vocab_size: int) -> list[int]:
    """Fixed tokens that trainer and servers rate; short enough for both."""
    longest = config.inference.max_model_len or config.training.seq_len
    return probe_tokens(
        vocab_size, max(2, min(_PROBE_LENGTH, longest - 1, config.training.seq_len))
    )


def _patience_seconds(sync: WeightSync) -> float:
    """Bound of what ranks wait for each other within one version."""
    return 10 * sync.timeout_seconds + 600


def _agree_on_held(sync: WeightSync, device: torch.device, num_servers: int) -> int:
    """How many slots may be held for versions that are sent from them; collective.

    On CUDA none: buckets are put together from shards on all devices, in memory of their own.

    Args:
        num_servers: As rank 0 knows them. Others may join later: with more versions alive
            than can be held, buckets are copied out of the slots.
    """
    max_held = [max_alive(sync.max_versions, num_servers, sync.delta)]
    dist.broadcast_object_list(max_held, src=0)
    return max_held[0] if device.type == "cpu" else 0


def _make_slots(
    sync: WeightSync,
    plan: PushPlan,
    parameters: dict[str, torch.Tensor],
    device: torch.device,
    max_held: int,
) -> tuple[RankSlots, torch.device]:
    """This rank's slots, and the device where they lie; collective."""
    if device.type == "cpu":
        return make_slots(plan, sync.num_slots + max_held), device
    staging = "device" if sync.staging == "auto" else sync.staging
    names = plan.names_from(dist.get_rank())
    shards = device_slots(parameters, names, sync.num_slots, plan.wire_dtype, staging)
    return RankSlots(shards), torch.device("cpu") if staging == "host" else device


def _own_agent(
    sync: WeightSync,
    gatherer: Gatherer,
    slots: RankSlots,
    snapshots: Snapshots,
    filled: FilledSlots,
    settings: GroupSettings,
) -> LocalAgent:
    pool = None
    if gatherer.own is not None:
        pool = PayloadPool(
            [bucket.spec for bucket in gatherer.own.buckets],
            [bucket.num_bytes for bucket in gatherer.own.buckets],
            settings.device,
            sync.checksum,
            slots.buckets,
        )
    read = read_snapshot(snapshots, filled, _patience_seconds(sync))
    return LocalAgent(dist.get_rank(), gatherer, read, pool, settings)


def _channel(sync: WeightSync) -> tuple[LeaderChannel | None, Address]:
    """Rank 0's end, and what every rank must know to reach it. Collective."""
    channel = LeaderChannel(2 * _patience_seconds(sync)) if dist.get_rank() == 0 else None
    addresses: list[Address | None] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, channel.address if channel is not None else None)
    assert addresses[0] is not None
    return channel, addresses[0]


def _make_leader(
    config: JobConfig,
    agent: LocalAgent,
    channel: LeaderChannel | None,
    plan: PushPlan,
    slots: SlotTable,
    attestation: Attestation,
    link: RolloutLink,
    servers: list[ServerInfo],
    on_change: Callable[[], None],
) -> Leader:
    """Called in the event loop that the leader will run in."""
    sync = config.weight_sync
    settings = LaneSettings(
        push_timeout_seconds=sync.push_timeout_seconds,
        retry_seconds=sync.retry_seconds,
        max_retry_seconds=sync.max_retry_seconds,
        delta=sync.delta,
        attestation=attestation,
    )
    return Leader(
        slots,
        _leader_parts(config, agent, channel, plan),
        settings,
        Listeners(on_change, link.notify_version, link.notify_lost),
        sync.max_versions,
        servers,
        link.watch.poll,
    )


def _leader_parts(
    config: JobConfig, agent: LocalAgent, channel: LeaderChannel | None, plan: PushPlan
) -> LeaderParts:
    assert channel is not None
    sync = config.weight_sync
    num_buckets = {source.rank: len(source.buckets) for source in plan.sources}
    agents = agents_of_all_ranks(agent, channel, num_buckets)
    sources = [source for source in agents if source.num_buckets]
    disk = None
    if sync.transport == "disk":
        assert sync.disk_path is not None
        directories = VersionDirectories(Path(sync.disk_path), Path(config.model.hf_assets_path))
        num_bytes = sum(source.num_bytes for source in plan.sources)
        disk = DiskVersions(directories, sources, num_bytes)

    def make_connection(server: ServerInfo) -> Connection:
        client = client_for(config.inference, server)
        if disk is not None:
            return DiskConnection(client, disk, sync.timeout_seconds)
        return GroupConnection(client, sources, sync.timeout_seconds)

    async def close() -> None:
        await agent.close()
        channel.close()
        if disk is not None:
            disk.close()

    return LeaderParts(
        agents=agents,
        make_connection=make_connection,
        disk=disk,
        listen=lambda: asyncio.create_task(channel.listen(), name="agents"),
        close=close,
    )


def _describe_memory(sync: WeightSync, plan: PushPlan, max_held: int, num_servers: int) -> str:
    gib = 1024**3
    total = sum(source.num_bytes for source in plan.sources)
    largest = max(source.num_bytes for source in plan.sources)
    slot = max(layout.num_bytes for layout in plan.layouts.values())
    alive = max_alive(sync.max_versions, num_servers, sync.delta)
    version = (
        f"a version has {total / gib:.3f} GiB in {sum(len(s.buckets) for s in plan.sources)} "
        f"buckets from {len(plan.sources)} source rank(s). Memory: "
    )
    if max_held:
        return version + (
            f"on a source rank {sync.num_slots + max_held} slots of {slot / gib:.3f} GiB, "
            f"{max_held} of them for versions that servers are still sent; as many of its shards "
            "on a rank that cannot reach its source's memory "
            "(weight_sync.num_slots, weight_sync.max_versions)."
        )
    return version + (
        f"{sync.num_slots} slots of this rank's shards, and on a source rank at most {alive} "
        f"versions of {largest / gib:.3f} GiB (weight_sync.num_slots, weight_sync.max_versions)."
    )


def weight_backend(config: JobConfig, device_type: str) -> str:
    """Resolves ``weight_sync.backend``; see there."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    if device_type == "cpu" or config.inference.device == "cpu":
        return "gloo"
    # Launched servers share the trainer's GPUs unless there are some to spare, and NCCL
    # refuses two ranks on one GPU.
    _, are_their_own = gpus_for_servers()
    return "gloo" if config.inference.launch and not are_their_own else "nccl"


def client_for(inference: Inference, server: ServerInfo) -> InferenceClient:
    """A client with the configured keys and timeouts."""
    return make_client(
        server.kind,
        server.url,
        api_key=inference.api_key,
        admin_key=inference.admin_key,
        control_timeout_seconds=inference.control_timeout_seconds,
        idle_seconds=_IDLE_SECONDS,
    )
