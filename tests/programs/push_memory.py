"""Counts the memory that snapshot slots take in a layout, and compares it with the prediction."""

import ctypes
import gc
from pathlib import Path

import torch.distributed as dist
from build_model import build

from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.weight_sync.gather import agree_on_push
from torchtitan.grpo.weight_sync.leader import max_alive
from torchtitan.grpo.weight_sync.memory_plan import NUM_SLOTS, memory_of, predict_memory, wire_dtype
from torchtitan.grpo.weight_sync.slot_layout import SnapshotSlots

NUM_SERVERS = 2
ROLLUP = Path("/proc/self/smaps_rollup")


def held_bytes() -> int:
    """Returns the data that this process holds, with shared memory divided among those who map it.

    Pages of files, such as libraries, are left out, and pages that the process got when it was forked count
    whole: its part of them rises whenever another process that maps them ends.
    """
    dist.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that would be used again does not count
    rollup = dict(line.split(":") for line in ROLLUP.read_text().splitlines()[1:])
    found = 1024 * sum(int(rollup[name].split()[0]) for name in ("Anonymous", "Pss_Shmem"))
    dist.barrier()
    return found


def main(arguments):
    layout = arguments["layout"]
    built = build(arguments["model"], seq_len=8, **layout)
    config = built.config
    config.parallelism.tensor_parallel_degree = layout.get("tp", 1)
    config.weight_sync.bucket_bytes = 8 * 1024**2
    parameters = dict(named_parameters(built.parts))
    sync, dtype = config.weight_sync, wire_dtype(config)
    on_gpu = arguments["on_gpu"]
    plan = agree_on_push(
        parameters,
        built.adapter,
        dtype,
        sync.bucket_bytes,
        max_sources=sync.max_sources,
        contiguous=on_gpu,
    )
    shapes: dict[str, tuple[int, ...]] = {}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {n: tuple(p.shape) for n, p in parameters.items()})
    for held in everyone:
        shapes |= held
    predicted = predict_memory(
        config, shapes, built.adapter, NUM_SERVERS, num_ranks=dist.get_world_size(), on_gpu=on_gpu
    )
    held = max_alive(sync, NUM_SERVERS)
    before = held_bytes()
    slots = SnapshotSlots(plan, NUM_SLOTS + held)
    counted = held_bytes() - before
    assert len(slots.shards) == predicted.num_slots
    return {
        "counted": counted,
        "predicted": predicted.slots,
        "planned": memory_of(plan, sync, held, NUM_SERVERS).slots,
        "buckets": [predicted.largest_bucket, memory_of(plan, sync, held, 2).largest_bucket],
    }
