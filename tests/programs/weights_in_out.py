"""Loads a directory in several layouts, and takes the weights out again by each way."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from build_model import Built, build
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.hf_weights import export_hf, named_parameters
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.payloads import PayloadPool
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
    """What this rank is a source of: names in the order of the bytes, tensors, buckets."""

    names: list[str]
    tensors: dict[str, torch.Tensor]
    num_buckets: int
    read_in_place: list[int]


async def gathered(built: Built, *, is_shared: bool) -> Gathered:
    parameters = dict(named_parameters(built.parts))
    snapshots = Snapshots(parameters, 2, torch.bfloat16, CPU, is_shared=is_shared)
    gatherer = Gatherer(
        parameters, built.adapter, wire_dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES,
        backend="gloo", timeout_seconds=60.0, device=CPU, shared=snapshots.shared,
    )  # fmt: skip
    plans = gatherer.own.buckets if gatherer.own is not None else ()
    pool = PayloadPool([p.spec for p in plans], [p.num_bytes for p in plans], CPU, False)
    tensors, names = {}, []
    for slot in range(2):  # the second time with whatever the first left behind
        snapshots.copy_into(slot)
        payload = pool.take(slot) if plans else None
        await asyncio.to_thread(gatherer.gather, slot, snapshots.read(slot), payload)
        if payload is None:
            continue
        buckets = [payload.bucket(index) for index in range(len(plans))]
        names = [name for bucket in buckets for name in bucket.spec.names]
        for bucket in buckets:
            flat = bucket.payload.view(torch.bfloat16)
            sizes = [torch.Size(shape).numel() for shape in bucket.spec.shapes]
            pieces = flat.split(sizes)
            for name, shape, piece in zip(
                bucket.spec.names, bucket.spec.shapes, pieces, strict=True
            ):
                tensors[name] = piece.view(shape).clone()
        pool.drop(slot)
    snapshots.close()
    return Gathered(names, tensors, len(plans), sorted(gatherer.read_in_place))


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
        "read_in_place": [sent.read_in_place, shared.read_in_place],
        "own_names": [name for name, _ in named_parameters(built.parts)],
        "wrongly_loaded": wrongly_loaded(built, source),
        "wrongly_gathered": differences(sent.tensors, expected),
        "wrongly_shared": differences(shared.tensors, expected),
        "wrongly_exported": differences(exported, source),
    }


def main(arguments):
    return {case["name"]: run_case(case, Path(arguments["folder"])) for case in arguments["cases"]}
