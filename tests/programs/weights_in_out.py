"""Loads a directory in several layouts, and takes the weights out again by each way."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from build_model import Built, build
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.hf_weights import export_hf, named_parameters
from torchtitan.grpo.weight_sync.gather import Gatherer, agree_on_push
from torchtitan.grpo.weight_sync.payloads import Bucket, PayloadPool
from torchtitan.grpo.weight_sync.slot_memory import make_slots
from torchtitan.grpo.weight_sync.snapshot import Snapshots

CPU = torch.device("cpu")
BUCKET_BYTES = 10_000


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names that are missing, unexpected or unequal."""
    unequal = [n for n in found if n in expected and not torch.equal(found[n], expected[n])]
    return sorted(found.keys() ^ expected.keys()) + unequal


def wrongly_loaded(built: Built, source: dict[str, torch.Tensor]) -> list[str]:
    """By DTensor's own way of putting parameters together."""
    wrong = []
    # Redistributing strided shards is slow, which torch says for each rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in named_parameters(built.parts):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        hf = built.adapter.to_hf({name: full.detach()})
        wrong += [key for key, tensor in hf.items() if not torch.equal(tensor, source[key])]
    return wrong


@dataclass
class Gathered:
    """What this rank is a source of: names in the order of the bytes, tensors, buckets.

    ``tensors`` are those of a version that is sent from its slot, then of one that is not.
    """

    names: list[str]
    tensors: list[dict[str, torch.Tensor]]
    num_buckets: int
    in_place: list[int]


async def gathered(built: Built, *, is_shared: bool) -> Gathered:
    parameters = dict(named_parameters(built.parts))
    plan = agree_on_push(parameters, built.adapter, torch.bfloat16, BUCKET_BYTES)
    slots = make_slots(plan.layouts, plan.sources, 2, is_shared=is_shared)
    snapshots = Snapshots(parameters, slots.shards, CPU)
    gatherer = Gatherer(
        plan, slots, built.adapter, backend="gloo", timeout_seconds=60.0, device=CPU
    )
    buckets = gatherer.own.buckets if gatherer.own is not None else ()
    specs, sizes = [b.spec for b in buckets], [b.num_bytes for b in buckets]
    pool = PayloadPool(specs, sizes, CPU, False, slots.buckets)
    tensors, names = [], []
    for slot in range(2):
        snapshots.copy_into(slot)
        is_held = slot == 0
        payload = pool.take(slot, slot if is_held else None) if buckets else None
        await asyncio.to_thread(gatherer.gather, slot, snapshots.read(slot), payload)
        if payload is None:
            continue
        assert slots.buckets is not None
        lies_in_slot = payload.buffers[0].data_ptr() == slots.buckets[slot][0].data_ptr()
        assert lies_in_slot == is_held, (slot, is_held)
        filled = [payload.bucket(index) for index in range(len(buckets))]
        names = [name for bucket in filled for name in bucket.spec.names]
        tensors.append({name: t.clone() for b in filled for name, t in tensors_of(b)})
        pool.drop(slot)
    snapshots.close()
    in_place = slots.in_place.get(dist.get_rank(), set())
    return Gathered(names, tensors, len(buckets), sorted(in_place))


def tensors_of(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    flat = bucket.payload.view(torch.bfloat16)
    pieces = flat.split([torch.Size(shape).numel() for shape in bucket.spec.shapes])
    for name, shape, piece in zip(bucket.spec.names, bucket.spec.shapes, pieces, strict=True):
        yield name, piece.view(shape)


def run_case(case: dict, folder: Path) -> dict:
    built = build(case["model"], seq_len=8, **case["layout"])
    source = load_file(Path(case["model"]) / "model.safetensors")
    sent, shared = (asyncio.run(gathered(built, is_shared=shared)) for shared in (False, True))
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
        "in_place": [sent.in_place, shared.in_place],
        "own_names": [name for name, _ in named_parameters(built.parts)],
        "wrongly_loaded": wrongly_loaded(built, source),
        "wrongly_gathered": [wrong for t in sent.tensors for wrong in differences(t, expected)],
        "wrongly_shared": [wrong for t in shared.tensors for wrong in differences(t, expected)],
        "wrongly_exported": differences(exported, source),
    }


def main(arguments):
    return {case["name"]: run_case(case, Path(arguments["folder"])) for case in arguments["cases"]}
