"""Loads a directory in several layouts, and reads the weights back in every way."""

import asyncio
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

import torch
import torch.distributed as dist
from build_model import Built, build
from safetensors.torch import load_file
from sharded_model import whole

from torchtitan.grpo.models.hf_weights import export_hf
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.system.host_memory import SlotOffer, attach
from torchtitan.grpo.weight_sync import slot_layout
from torchtitan.grpo.weight_sync.gather import Gatherer, agree_on_push
from torchtitan.grpo.weight_sync.payloads import Bucket, PayloadPool
from torchtitan.grpo.weight_sync.snapshot import Snapshots

CPU = torch.device("cpu")
BUCKET_BYTES = 10_000
# Slot and factor of the parameters; slot 0 is held. The last version comes to lie on what
# the first left behind.
VERSIONS = ((0, 2.0), (1, 4.0), (0, 1.0))
Reach = Literal["none", "some", "all", "all, contiguous"]
"""Which ranks reach the memory of their source; and whether they copy to contiguous memory."""


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    unequal = [n for n in found if n in expected and not torch.equal(found[n], expected[n])]
    return sorted(found.keys() ^ expected.keys()) + unequal


def wrongly_loaded(built: Built, source: dict[str, torch.Tensor]) -> list[str]:
    wrong = []
    # Redistributing strided shards is slow, which torch says for each rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in named_parameters(built.parts):
        hf = built.adapter.to_hf({name: whole(parameter).detach()})
        wrong += [key for key, tensor in hf.items() if not torch.equal(tensor, source[key])]
    return wrong


@dataclass
class Gathered:
    """What this rank is a source of: names in the order of the bytes, tensors, buckets.

    ``tensors`` are those of each version, divided by its factor.
    """

    names: list[str]
    tensors: list[dict[str, torch.Tensor]]
    num_buckets: int
    in_place: list[int]


def attach_as(reach: Reach, offer: SlotOffer) -> list[torch.Tensor] | None:
    """``some``: as if ranks with odd numbers were on another host; ``none``: all others."""
    is_reached = reach.startswith("all") or (reach == "some" and dist.get_rank() % 2 == 0)
    return attach(offer) if is_reached else None


async def gathered(built: Built, reach: Reach) -> Gathered:
    parameters = dict(named_parameters(built.parts))
    plan = agree_on_push(
        parameters, built.adapter, torch.bfloat16, BUCKET_BYTES, contiguous="contiguous" in reach
    )
    with mock.patch.object(slot_layout, "attach", functools.partial(attach_as, reach)):
        storage = slot_layout.SnapshotSlots(plan, 2)
    snapshots = Snapshots(parameters, storage.shards, CPU)
    gatherer = Gatherer(plan, storage, built.adapter, timeout_seconds=60.0)
    source = plan.source(dist.get_rank())
    buckets = source.buckets if source is not None else ()
    specs, sizes = [b.spec for b in buckets], [b.num_bytes for b in buckets]
    pool = PayloadPool(specs, sizes, False, storage.buckets)
    tensors, names = [], []
    for version, (slot, factor) in enumerate(VERSIONS):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(factor)
            snapshots.copy_into(slot)
            snapshots.fence()
            for parameter in parameters.values():
                parameter.div_(factor)
        is_held = slot == 0
        payload = pool.take(version, slot if is_held else None) if buckets else None
        await asyncio.to_thread(gatherer.gather, slot, snapshots.read(slot), payload)
        if payload is not None:
            in_slot = storage.buckets(slot)
            assert in_slot is not None
            lies_in_slot = payload.buffers[0].data_ptr() == in_slot[0].data_ptr()
            assert lies_in_slot == is_held, (slot, is_held)
            filled = [payload.bucket(index) for index in range(len(buckets))]
            names = [name for bucket in filled for name in bucket.spec.names]
            tensors.append({name: t / factor for b in filled for name, t in tensors_of(b)})
            pool.drop(version)
        dist.barrier()  # as the leader waits for all before a slot is written again
    snapshots.close()
    in_place = storage.writers(dist.get_rank())
    return Gathered(names, tensors, len(buckets), sorted(in_place))


def tensors_of(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    flat = bucket.payload.view(torch.bfloat16)
    pieces = flat.split([torch.Size(shape).numel() for shape in bucket.spec.shapes])
    for name, shape, piece in zip(bucket.spec.names, bucket.spec.shapes, pieces, strict=True):
        yield name, piece.view(shape)


def run_case(case: dict, folder: Path) -> dict:
    built = build(case["model"], seq_len=8, **case["layout"])
    source = load_file(Path(case["model"]) / "model.safetensors")
    by_reach = {reach: asyncio.run(gathered(built, reach)) for reach in get_args(Reach)}
    sent = by_reach["none"]
    is_receiver = dist.get_rank() == 0
    expected = {k: v.bfloat16() for k, v in source.items() if k in sent.names}
    target = folder / case["name"]
    export_hf(
        built.parts, built.adapter, built.hf_model.path, target, torch.float32,
        is_writer=is_receiver, max_file_bytes=30_000,
    )  # fmt: skip
    dist.barrier()  # the directory is complete for those that read it now
    exported = {}
    for file in sorted(target.glob("*.safetensors")):
        exported |= load_file(file)
    return {
        "num_buckets": sent.num_buckets,
        "gathered_names": sent.names,
        "in_place": {reach: found.in_place for reach, found in by_reach.items()},
        "own_names": [name for name, _ in named_parameters(built.parts)],
        "wrongly_loaded": wrongly_loaded(built, source),
        "wrongly_gathered": {
            reach: [wrong for tensors in found.tensors for wrong in differences(tensors, expected)]
            for reach, found in by_reach.items()
        },
        "wrongly_exported": differences(exported, source),
    }


def main(arguments):
    return {case["name"]: run_case(case, Path(arguments["folder"])) for case in arguments["cases"]}
