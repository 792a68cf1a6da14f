# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rank assembles which parameters, and in which buckets they are sent.

The functions are pure and give the same result on all ranks. Every source sends what it has
assembled, about equally many bytes, to every server, and a server can receive from all at the
same time, so that neither one network interface nor one process limits the speed of a push.

Ranks that share a parameter form a family. Without pipeline parallelism, all ranks are one family;
with it, the ranks that hold the same stages are one. Each family has at least one source, because other
ranks do not hold its parameters. Within a family, parameters are assigned in descending order of
size, each to the source that has the fewest elements so far (R. L. Graham, "Bounds on multiprocessing
timing anomalies", 1969). No source therefore sends more than the mean plus one parameter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.models.lora import PeftStateDictAdapter, lora_scale
from torchtitan.grpo.models.shards import Assembly, Piece, in_buckets
from torchtitan.grpo.weight_wire.adapter_names import is_adapter, target_of
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of a bucket, in the order of its bytes.

    ``num_bytes_of`` gives each parameter's size in the Hugging Face layout, by native name.
    """

    assemblies: tuple[Assembly, ...]
    spec: BucketSpec
    num_bytes_of: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.num_bytes_of.values())


@dataclass(frozen=True)
class SourcePlan:
    """What one source sends. ``members`` are the source and all ranks that send blocks to it, ascending."""

    rank: int
    members: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class SourceLimits:
    """Limits on sources. ``hosts`` numbers each rank's host, 0 if absent; ``max_sources`` = 0 is no limit."""

    max_sources: int = 0
    hosts: tuple[int, ...] = ()

    def host(self, rank: int) -> int:
        return self.hosts[rank] if rank < len(self.hosts) else 0


def plan_sources(
    assemblies: Sequence[Assembly],
    adapter: StateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    limits: SourceLimits = SourceLimits(),
) -> list[SourcePlan]:
    """Returns the sources by ascending rank, each with its buckets in the order of the model."""
    by_source = choose_sources(assemblies, limits)
    return [
        SourcePlan(
            rank=rank,
            members=tuple(sorted({rank} | {p.rank for a in members for p in a.pieces})),
            buckets=tuple(plan_buckets(members, adapter, wire_dtype, bucket_bytes)),
        )
        for rank, members in sorted(by_source.items())
    ]


def plan_buckets(
    assemblies: Sequence[Assembly],
    adapter: StateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
) -> list[BucketPlan]:
    """Divides parameters into buckets of at most ``bucket_bytes``, unless one alone is larger.

    LoRA adapters that are sent as a part of their target weight are in the target's bucket.
    """
    assemblies = _with_adapters_behind(assemblies)
    metas = {a.name: hf_meta(adapter, a.name, a.shape) for a in assemblies}

    def num_bytes(assembly: Assembly) -> int:
        return sum(m.numel() * wire_dtype.itemsize for m in metas[assembly.name].values())

    plans = []
    for members in in_buckets(assemblies, num_bytes, bucket_bytes):
        shapes = {key: tuple(m.shape) for a in members for key, m in metas[a.name].items()}
        spec = BucketSpec(
            names=tuple(shapes),
            dtypes=(str(wire_dtype).removeprefix("torch."),) * len(shapes),
            shapes=tuple(shapes.values()),
            lora_scale=lora_scale(adapter) if isinstance(adapter, PeftStateDictAdapter) else None,
            lora_base=adapter.base_digest if isinstance(adapter, PeftStateDictAdapter) else None,
        )
        plans.append(BucketPlan(tuple(members), spec, {a.name: num_bytes(a) for a in members}))
    return plans


def _with_adapters_behind(assemblies: Sequence[Assembly]) -> list[Assembly]:
    """Puts each LoRA adapter right behind its target, as a bias in between could start a new bucket."""
    weights = {a.name for a in assemblies if not is_adapter(a.name)}
    adapters_of: dict[str, list[Assembly]] = {}
    for assembly in assemblies:
        target = target_of(assembly.name)
        if is_adapter(assembly.name) and target in weights:
            adapters_of.setdefault(target, []).append(assembly)
    behind = {a.name for adapters in adapters_of.values() for a in adapters}
    return [
        each
        for assembly in assemblies
        if assembly.name not in behind
        for each in (assembly, *adapters_of.get(assembly.name, ()))
    ]


def choose_sources(
    assemblies: Sequence[Assembly], limits: SourceLimits
) -> dict[int, list[Assembly]]:
    """Returns what each source assembles, in the order of ``assemblies``.

    A block that its source does not hold is sent by one of the ranks that hold it: preferably by one
    on the source's host, and among several by the one that has the least to send.
    """
    families = families_of(assemblies)
    num_ranks = sum(len(family) for family in families)
    source_of: dict[str, int] = {}
    for family in families:
        wanted = limits.max_sources * len(family) // num_ranks if limits.max_sources else num_ranks
        sources = _spread_over_hosts(family, limits)[: max(1, wanted)]
        members = [a for a in assemblies if not family.isdisjoint(_holders(a))]
        source_of |= _assign(members, sources)
    num_sent = dict.fromkeys(range(1 + max(map(max, families), default=0)), 0)
    by_source: dict[int, list[Assembly]] = {}
    for assembly in assemblies:
        source = source_of[assembly.name]
        chosen = _with_senders(assembly, source, limits, num_sent)
        by_source.setdefault(source, []).append(chosen)
    return by_source


def families_of(assemblies: Sequence[Assembly]) -> list[set[int]]:
    """Returns the sets of ranks that share parameters, directly or through other ranks."""
    families: list[set[int]] = []
    for ranks in {frozenset(_holders(assembly)) for assembly in assemblies}:
        family = set(ranks)
        for other in [f for f in families if not f.isdisjoint(family)]:
            family |= other
            families.remove(other)
        families.append(family)
    return sorted(families, key=min)


def _holders(assembly: Assembly) -> set[int]:
    return {rank for piece in assembly.pieces for rank in piece.holders}


def _spread_over_hosts(family: Collection[int], limits: SourceLimits) -> list[int]:
    """Orders the ranks of a family so that the first ones lie on many different hosts."""
    num_on_host: dict[int, int] = {}
    keys = {}
    for rank in sorted(family):
        host = limits.host(rank)
        keys[rank] = num_on_host[host] = num_on_host.get(host, 0) + 1
    return sorted(family, key=lambda rank: (keys[rank], rank))


def _assign(assemblies: Sequence[Assembly], sources: Sequence[int]) -> dict[str, int]:
    """Returns the source of each parameter, by name. A LoRA adapter has the source of its target."""
    num_elements = dict.fromkeys(sorted(sources), 0)
    source_of = {}
    targets = {a.name for a in assemblies if not is_adapter(a.name)}
    alone = [a for a in assemblies if a.name in targets or target_of(a.name) not in targets]
    for assembly in sorted(alone, key=lambda a: -a.numel):
        holders = _holders(assembly)
        source = min(num_elements, key=lambda r: (num_elements[r], r not in holders, r))
        num_elements[source] += assembly.numel
        source_of[assembly.name] = source
    return {
        a.name: source_of[a.name if a.name in source_of else target_of(a.name)] for a in assemblies
    }


def _with_senders(
    assembly: Assembly, source: int, limits: SourceLimits, num_sent: dict[int, int]
) -> Assembly:
    """Chooses a sender for each block of a parameter, and adds the block's elements to ``num_sent``."""

    def sent(piece: Piece) -> Piece:
        rank = min(
            piece.holders,
            key=lambda r: (r != source, limits.host(r) != limits.host(source), num_sent[r], r),
        )
        num_sent[rank] += piece.block.numel
        return piece.sent_by(rank)

    return replace(assembly, pieces=tuple(sent(piece) for piece in assembly.pieces))
