# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Predicts, before a run starts, how much memory the weight push will hold.

Snapshot slots in host memory are allocated at the start. Over NCCL, each rank that sends has a
buffer on its GPU for each server, which is allocated when the server joins.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.collect import module_of
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.lora import PeftStateDictAdapter
from torchtitan.grpo.models.shards import Assembly, Block, Piece, model_order
from torchtitan.grpo.pipeline.schedules import AUTO, candidates
from torchtitan.grpo.pipeline.stages import fixes_stages, rank_of_parameter, stage_modules
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.weight_sync.leader import max_alive
from torchtitan.grpo.weight_sync.plan import SourceLimits
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, plan_push
from torchtitan.grpo.weight_sync.transports.group_end import PIECE_BYTES

NUM_SLOTS = 2
"""Snapshots of the local shards: one is sent while the next is filled."""
_MIB, _GIB = 1024**2, 1024**3
# Tensor parallelism divides these parameters by columns, so that a rank's part is not contiguous.
_BY_COLUMNS = (".attention.wo.weight", ".feed_forward.w2.weight")


@dataclass(frozen=True)
class PushMemory:
    """The memory that the push holds, in bytes.

    A version takes ``version`` bytes on the wire, and ``slot`` bytes of host memory, summed over the
    ranks that send. Of ``num_slots``, ``num_held`` are for versions that servers still receive.
    ``model`` is the size of the whole model on the wire, even if only LoRA adapters are sent.
    """

    version: int
    slot: int
    num_slots: int
    num_held: int
    largest_bucket: int
    num_servers: int
    model: int = 0

    @property
    def slots(self) -> int:
        """Host memory of all slots, summed over all ranks that send."""
        return self.slot * self.num_slots

    def describe(self, *, on_gpu: bool) -> Iterator[str]:
        if self.version < self.model:
            yield (
                f"a version of the adapters has {_text(self.version)}, and one of the whole model "
                f"would have {_text(self.model)}"
            )
        else:
            yield f"a version of the weights has {_text(self.version)}"
        yield (
            f"host memory of the ranks that send: {_text(self.slots)} together, in {self.num_slots} "
            f"snapshot slots, {self.num_held} of them for versions that "
            "servers still receive (weight_sync.max_versions)"
        )
        yield (
            "host memory of a rank on another host than the rank that sends its weights: "
            f"{self.num_slots} copies of its own shards"
        )
        if on_gpu:
            piece = min(self.largest_bucket, PIECE_BYTES)
            whole = ""
            if self.largest_bucket > piece:
                whole = f" ({_text(self.largest_bucket)} for SGLang, weight_sync.bucket_bytes)"
            yield (
                f"GPU of a rank that sends: {_text(piece * self.num_servers)} over NCCL, a buffer of "
                f"{_text(piece)} for each of {self.num_servers} servers{whole}, and NCCL's own; "
                "nothing over gloo or disk"
            )


def _text(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def memory_of(plan: PushPlan, sync: WeightSync, max_held: int, num_servers: int) -> PushMemory:
    return PushMemory(
        version=plan.num_bytes,
        slot=sum(layout.num_bytes for layout in plan.layouts.values()),
        num_slots=NUM_SLOTS + max_held,
        num_held=max_held,
        largest_bucket=max(b.num_bytes for source in plan.sources for b in source.buckets),
        num_servers=num_servers,
        model=plan.model_bytes,
    )


def predict_memory(
    config: JobConfig,
    shapes: dict[str, tuple[int, ...]],
    adapter: StateDictAdapter,
    num_servers: int,
    *,
    num_ranks: int,
    on_gpu: bool,
) -> PushMemory:
    """Returns the memory that a push will need, before any rank exists.

    Plans the whole push, because sizes depend on it: parameters that tensor parallelism divides by
    columns lie in a slot twice if GPUs copy, and a rank may have less to send than a bucket holds.
    """
    sync, degree = config.weight_sync, config.parallelism.tensor_parallel_degree
    adapter = adapter_of_push(config, adapter)
    ranks_of = _ranks_by_name(config, shapes, num_ranks)
    assemblies = [
        _assembly(name, shapes[name], degree, ranks_of[name])
        for name in sorted(shapes, key=model_order)
    ]
    plan = plan_push(
        assemblies, adapter, wire_dtype(config), sync.bucket_bytes, SourceLimits(sync.max_sources),
        adapters_only=isinstance(adapter, PeftStateDictAdapter), contiguous=on_gpu,
    )  # fmt: skip
    return memory_of(plan, sync, max_alive(sync, num_servers), num_servers)


def describe_placement(config: JobConfig, num_layers: int) -> Iterator[str]:
    """Yields a note on the assumed placement of stages if the run chooses the placement later."""
    settings = config.parallelism
    degree = settings.pipeline_parallel_degree
    if degree == 1 or settings.pipeline_parallel_schedule != AUTO:
        return
    total = len(stage_modules(settings, num_layers))
    rows = candidates(degree, total if fixes_stages(settings) else None)
    if len({(row.placement, row.stages_per_rank) for row in rows}) > 1:
        yield (
            f"(for {total // degree} stages a rank in a V: the schedule is not chosen yet, because "
            f"parallelism.pipeline_parallel_schedule = {AUTO!r}; other placements divide the "
            "weights among the ranks in other ways, so that the figures may differ slightly)"
        )


def adapter_of_push(config: JobConfig, adapter: StateDictAdapter) -> StateDictAdapter:
    """Returns the state-dict adapter that names what is sent: the model's, or one with PEFT's names."""
    if config.lora.rank > 0 and config.lora.push == "adapters":
        return PeftStateDictAdapter(adapter, config.model.hf_assets_path)
    return adapter


def wire_dtype(config: JobConfig) -> torch.dtype:
    dtype = config.weight_sync.dtype
    name = config.training.mixed_precision_param if dtype == "auto" else dtype
    return TORCH_DTYPE_MAP[name]


def _ranks_by_name(
    config: JobConfig, names: Iterable[str], num_ranks: int
) -> dict[str, Sequence[int]]:
    """Returns the ranks that hold parts of each parameter."""
    settings, names = config.parallelism, list(names)
    if settings.pipeline_parallel_degree == 1:
        return dict.fromkeys(names, range(num_ranks))
    modules = {module_of(name) for name in names}
    rank_of = rank_of_parameter(settings, sum(m.startswith("layers.") for m in modules))
    per_rank = num_ranks // settings.pipeline_parallel_degree
    # Pipeline parallelism is the outermost dimension of the mesh of ranks.
    return {name: range(rank_of(name) * per_rank, (rank_of(name) + 1) * per_rank) for name in names}


def _assembly(name: str, shape: tuple[int, ...], degree: int, ranks: Sequence[int]) -> Assembly:
    """Describes a parameter as the parts into which tensor parallelism divides it.

    FSDP divides these parts into smaller, contiguous ones, which do not affect the layout.
    """
    if degree == 1 or not name.endswith(_BY_COLUMNS) or shape[-1] % degree:
        whole = Block((0,) * len(shape), shape)
        return Assembly(name, shape, (Piece(ranks[0], whole, tuple(ranks[1:])),))
    width = shape[-1] // degree
    pieces = []
    for index in range(degree):
        holders = ranks[index::degree]  # tensor parallelism is the innermost dimension
        block = Block((*(0,) * (len(shape) - 1), index * width), (*shape[:-1], width))
        pieces.append(Piece(holders[0], block, tuple(holders[1:])))
    return Assembly(name, shape, tuple(pieces))
