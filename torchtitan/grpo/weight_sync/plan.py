# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rank assembles which parameters, and in which buckets they are sent.

The functions are pure and give the same result on all ranks. Every source sends what it has
assembled to every server; `sources.py` chooses the sources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.models.lora import AdapterNames, lora_scale
from torchtitan.grpo.models.shards import Assembly, in_buckets
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter
from torchtitan.grpo.weight_sync.sources import SourceLimits, choose_sources
from torchtitan.grpo.weight_wire.adapter_names import is_adapter, target_of
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: which native parameters it needs, and what it holds.

    ``assemblies`` and ``spec`` are in the order of the bytes. ``num_bytes_of`` counts those of
    each parameter in the Hugging Face layout, by native name.
    """

    assemblies: tuple[Assembly, ...]
    spec: BucketSpec
    num_bytes_of: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.num_bytes_of.values())


@dataclass(frozen=True)
class SourcePlan:
    """The buckets that one rank assembles and sends to every server, in this order.

    ``members`` are the source and all ranks that send it blocks, ascending.
    """

    rank: int
    members: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def plan_sources(
    assemblies: Sequence[Assembly],
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    limits: SourceLimits = SourceLimits(),  # noqa: B008  (immutable)
) -> list[SourcePlan]:
    """Divides parameters, in the order of the model, among sources and then into buckets.

    The plans ascend by rank.
    """
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
    adapter: BaseStateDictAdapter,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
) -> list[BucketPlan]:
    """Divides parameters into buckets of at most ``bucket_bytes`` bytes.

    A bucket with only one parameter may be larger. LoRA adapters that are sent as a part of
    their target are in its bucket.
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
            lora_scale=lora_scale(adapter) if isinstance(adapter, AdapterNames) else None,
            lora_base=adapter.base_digest if isinstance(adapter, AdapterNames) else None,
        )
        plans.append(BucketPlan(tuple(members), spec, {a.name: num_bytes(a) for a in members}))
    return plans


def _with_adapters_behind(assemblies: Sequence[Assembly]) -> list[Assembly]:
    """Puts each LoRA adapter right behind its target.

    A bias, which comes after the weight, may begin another bucket.
    """
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
