# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the weight push from the configuration."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.attestation import (
    Attestation,
    Probes,
    attested_tokens,
    tolerances_of,
)
from torchtitan.grpo.config import Inference, WeightSync
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import IDLE_SECONDS, make_client
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.models.peft_format import AdapterNames
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.rank_channel import Address, LeaderChannel, Served, remote, serve
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter
from torchtitan.grpo.weight_sync.agent import Agent, ReadSnapshot
from torchtitan.grpo.weight_sync.gather import Gatherer, agree_on_push
from torchtitan.grpo.weight_sync.lane import Listeners
from torchtitan.grpo.weight_sync.leader import Leader, LeaderParts, max_alive
from torchtitan.grpo.weight_sync.memory_plan import memory_of, wire_dtype
from torchtitan.grpo.weight_sync.payloads import PayloadPool
from torchtitan.grpo.weight_sync.plan import ADAPTERS, ALL_PARAMETERS
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, Shards
from torchtitan.grpo.weight_sync.slot_memory import SnapshotSlots
from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions
from torchtitan.grpo.weight_sync.snapshot import Snapshots
from torchtitan.grpo.weight_sync.transports import make_transport
from torchtitan.grpo.weight_sync.transports.interface import Sender, Transport


@dataclass(frozen=True)
class _RankParts:
    """Holds the objects of one rank whose operations the leader calls.

    Attributes:
        agent: Takes part in copying and gathering versions.
        sender: Sends versions to servers; ``None`` if this rank is not a source.
    """

    agent: Agent
    sender: Sender | None

    @property
    def served(self) -> list[Served]:
        """The objects whose operations the leader may call."""
        return [self.agent] if self.sender is None else [self.sender, self.agent]


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
        config: The checked configuration.
        model_parts: The parts of the model on this rank.
        adapter: State-dict adapter of the model family.
        device: The training device.
        link: The link to the rollout process. Only rank 0, which leads, has one.
        servers: On rank 0, the servers to push to.
        vocab_size: Size of the vocabulary from which probe tokens are drawn.
    """
    sync = config.weight_sync
    parameters = dict(named_parameters(model_parts))
    on_gpu = device.type == "cuda"
    plan, adapter = _agree_on_plan(config, parameters, adapter, contiguous=on_gpu)
    transport = make_transport(config, plan, device)
    max_held = _agree_on_held(sync, len(servers))
    if link is not None:  # logged before the memory is allocated
        memory = memory_of(plan, sync, max_held, len(servers)).describe(on_gpu=on_gpu)
        logger.info(f"Weight sync: {plan.wire_dtype} {transport.describe()}; {'; '.join(memory)}.")
    memory_slots = SnapshotSlots(plan, sync.num_slots + max_held, pinned=on_gpu)
    snapshots = Snapshots(parameters, memory_slots.shards, device)
    gatherer = Gatherer(plan, memory_slots, adapter, _patience_seconds(sync))
    slots = SlotVersions() if link is None else SlotTable(sync.num_slots, max_held)

    def read(slot: int, version: int) -> Shards:
        slots.wait_filled(slot, version, _patience_seconds(sync))
        return snapshots.read(slot)

    rank_parts = _make_rank_parts(sync, plan, memory_slots, transport, gatherer, read)
    channel, address = _make_channel(sync)
    probes, make_leader = Probes(), None
    if link is not None:
        assert channel is not None and isinstance(slots, SlotTable)
        make_parts = functools.partial(_leader_parts, config, plan, rank_parts, channel, transport)
        attestation = _attestation(config, plan, probes, vocab_size)
        make_leader = functools.partial(
            _make_leader, sync, slots, make_parts, attestation, link, servers
        )
    return WeightPublisher(
        snapshots=snapshots,
        slots=slots,
        probes=probes,
        attest_every=sync.attest_every,
        make_leader=make_leader,
        follow=lambda: serve(rank_parts.served, dist.get_rank(), address),
    )


def _agree_on_plan(
    config: JobConfig,
    parameters: dict[str, torch.Tensor],
    adapter: BaseStateDictAdapter,
    *,
    contiguous: bool,
) -> tuple[PushPlan, BaseStateDictAdapter]:
    """Returns the plan of the push, and the adapter that gives the names; collective."""
    selection = ALL_PARAMETERS
    if config.lora.rank and config.lora.push == "adapters":
        selection, adapter = ADAPTERS, AdapterNames(adapter, config.model.hf_assets_path)
    plan = agree_on_push(
        parameters,
        adapter,
        wire_dtype(config),
        config.weight_sync.bucket_bytes,
        selection,
        max_sources=config.weight_sync.max_sources,
        contiguous=contiguous,
    )
    return plan, adapter


def client_for(inference: Inference, server: ServerInfo) -> InferenceClient:
    """Makes the client of a server, with the configured keys and timeouts."""
    return make_client(
        server.kind,
        server.url,
        api_key=inference.api_key,
        admin_key=inference.admin_key,
        control_timeout_seconds=inference.control_timeout_seconds,
        idle_seconds=IDLE_SECONDS,
    )


def _patience_seconds(sync: WeightSync) -> float:
    """Returns how long ranks wait for one another within one version."""
    return 10 * sync.timeout_seconds + 600


def _agree_on_held(sync: WeightSync, num_servers: int) -> int:
    """Returns the maximum number of slots that may be HELD; collective.

    Args:
        sync: The table ``[weight_sync]``.
        num_servers: Number of servers that rank 0 knows. Others may join later. If more versions
            then have buffers than slots can be HELD, buckets are copied out of the slots.
    """
    max_held = [max_alive(sync, num_servers)]
    dist.broadcast_object_list(max_held, src=0)
    return max_held[0]


def _make_rank_parts(
    sync: WeightSync,
    plan: PushPlan,
    slots: SnapshotSlots,
    transport: Transport[Any],
    gatherer: Gatherer,
    read: ReadSnapshot,
) -> _RankParts:
    rank, pool, sender = dist.get_rank(), None, None
    own = plan.source(rank)
    if own is not None:
        pool = PayloadPool(
            [bucket.spec for bucket in own.buckets],
            [bucket.num_bytes for bucket in own.buckets],
            sync.checksum,
            slots.buckets,
        )
        sender = transport.make_sender(rank, pool)
    return _RankParts(Agent(rank, gatherer, read, pool), sender)


def _make_channel(sync: WeightSync) -> tuple[LeaderChannel | None, Address]:
    """Opens the channel over which the leader calls the agents of other ranks; collective.

    Returns:
        The leader's end of the channel, which only rank 0 has, and the address at which the
        other ranks connect to it.
    """
    channel = LeaderChannel(2 * _patience_seconds(sync)) if dist.get_rank() == 0 else None
    addresses: list[Address | None] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, channel.address if channel is not None else None)
    assert addresses[0] is not None
    return channel, addresses[0]


def _attestation(config: JobConfig, plan: PushPlan, probes: Probes, vocab_size: int) -> Attestation:
    sync = config.weight_sync
    return Attestation(
        every=sync.attest_every,
        tokens=attested_tokens(config, vocab_size),
        probes=probes,
        tolerances=tolerances_of(plan.wire_dtype, sync.attest_tolerance),
        timeout_seconds=sync.timeout_seconds,
    )


def _make_leader(
    sync: WeightSync,
    slots: SlotTable,
    make_parts: Callable[[], LeaderParts],
    attestation: Attestation,
    link: RolloutLink,
    servers: list[ServerInfo],
    on_change: Callable[[], None],
) -> Leader:
    """Makes the leader; called in the event loop in which it will run."""
    listeners = Listeners(on_change, link.notify_version, link.notify_lost)
    return Leader(slots, make_parts(), sync, attestation, listeners, servers, link.watch.poll)


def _leader_parts(
    config: JobConfig,
    plan: PushPlan,
    own: _RankParts,
    channel: LeaderChannel,
    transport: Transport[Any],
) -> LeaderParts:
    others = range(1, dist.get_world_size())
    agents = [own.agent, *(remote(Agent, channel, rank) for rank in others)]
    senders = [
        own.sender if source.rank == 0 else remote(transport.sender_type, channel, source.rank)
        for source in plan.sources
    ]
    transport.lead(senders)

    async def close() -> None:
        for one in own.served:
            await one.close()
        channel.close()
        transport.close()

    return LeaderParts(
        agents=agents,
        sources=[agents[source.rank] for source in plan.sources],
        transport=transport,
        make_client=lambda server: client_for(config.inference, server),
        listen=lambda: asyncio.create_task(channel.listen(), name="agents"),
        close=close,
    )
