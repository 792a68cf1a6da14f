# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `helix_runtime.py`."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from pipeline_schedules_run import DIM, Checkpointed, Sleep, SleepingModule, SleepingStage
from pipeline_schedules_run import seconds_of_pass as seconds_of_stages
from rank_job import answer_job
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.models.weight_grads import WeightGradients, defer_linears
from torchtitan.grpo.pipeline.helix_schedule import HelixSchedule
from torchtitan.grpo.pipeline.lean_stage import EarlyRecompute, LeanStage
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Costs, StageCosts
from torchtitan.grpo.pipeline.tables.helix import helix
from torchtitan.grpo.pipeline.tables.simulate import simulate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))


class SleepingPart(nn.Module):
    """Stands for a part with weights: sleeps, and hands on tensors of the right kinds."""

    def __init__(self, cost: StageCosts, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        # The runtime recomputes a part, which sleeps again, except for the last one.
        self._times = cost.forward, cost.backward - (0.0 if is_last else cost.forward)
        self._is_last = is_last

    def forward(self, inputs: Any) -> Any:
        hidden = sum(inputs) if isinstance(inputs, tuple) else inputs
        hidden = Sleep.apply(hidden * self.weight, *self._times)
        return hidden if self._is_last else (hidden, hidden + 1, hidden + 2, hidden + 3)


class SleepingAttention(nn.Module):
    def __init__(self, cost: StageCosts) -> None:
        super().__init__()
        self._times = cost.forward, cost.backward

    def mask(self, _: dict[str, Any]) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        return Sleep.apply(q + k + v, *self._times).flatten(2)


def _stages(make: Callable[[int], nn.Module], num_parts: int) -> list[LeanStage]:
    """Returns this rank's parts with weights, of a model of ``num_parts`` parts."""
    count, rank = num_parts // 2 + 1, dist.get_rank()
    numbers = range(rank, count, dist.get_world_size())
    group, cpu = dist.group.WORLD, torch.device("cpu")
    return [LeanStage(make(n), n, count, cpu, group=group) for n in numbers]


def _sleeping_helix(costs: Costs) -> HelixSchedule:
    count = len(costs.stages) // 2
    return HelixSchedule(
        _stages(lambda n: SleepingPart(costs.stages[2 * n], n == count), len(costs.stages)),
        SleepingAttention(costs.stages[1]),
        lambda microbatches: helix(dist.get_world_size(), microbatches, costs),
        costs,
        lambda output, target: (output * target).sum(),
    )


def _sleeping_stages(name: str, costs: Costs) -> TableSchedule:
    """Returns a schedule of whole layers, of which the last one can be recomputed early."""
    row, degree = SCHEDULES[name], dist.get_world_size()
    ranks, store, stages = row.make_table(degree, 1, costs).ranks, WeightGradients(), []
    for index, rank in enumerate(ranks):
        if rank != dist.get_rank():
            continue
        cost = costs.stages[index]
        again = cost.recompute
        first = SleepingModule(cost.forward - again, cost.input_grad - again)
        last = SleepingModule(again, 0.0)
        module = nn.Sequential(first, last)
        defer_linears(module, store)
        module[1] = Checkpointed(last)
        stage = PipelineStage(module, index, len(ranks), torch.device("cpu"))
        stages.append(SleepingStage(stage, store))
        stages[-1].early = EarlyRecompute(module, -1)
        stages[-1].weight_seconds = cost.weight_grad / 2  # each module has one weight
    return TableSchedule(
        stages,
        lambda microbatches: row.make_table(degree, microbatches, costs),
        costs,
        lambda output, target: (output * target).sum(),
    )


def _seconds_of_helix(schedule: HelixSchedule, microbatches: int) -> float:
    """As :func:`seconds_of_stages`."""
    rows = [torch.randn(1, 1, DIM) for _ in range(microbatches)]
    has_first, has_last = dist.get_rank() == 0, any(s.is_last for s in schedule.stages)
    dist.barrier()
    begin = time.monotonic()
    schedule.run(
        [(row,) if has_first else () for row in rows], [{}] * microbatches,
        [torch.ones(1, 1, DIM)] * microbatches if has_last else None,
    )  # fmt: skip
    dist.barrier()
    return time.monotonic() - begin


def sleeping(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of each round of each schedule."""
    microbatches = job["microbatches"]
    run: dict[str, Callable[[], float]] = {}
    for name, stages in job["costs"].items():
        costs = Costs(tuple(StageCosts(**stage) for stage in stages))
        if name == "Helix":
            run[name] = partial(_seconds_of_helix, _sleeping_helix(costs), microbatches)
        else:
            run[name] = partial(seconds_of_stages, _sleeping_stages(name, costs), microbatches)
    Sleep.is_awake = True
    for once in run.values():
        once()  # builds tables and learns shapes
    Sleep.is_awake = False
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(job["rounds"]):
        for name, once in run.items():
            seconds[name].append(once())
    return seconds


class Part(nn.Module):
    """The part of a layer with weights, with the sizes of a real one."""

    def __init__(self, job: dict[str, Any], number: int) -> None:
        super().__init__()
        dim, ffn, kv = job["dim"], job["ffn"], job["kv_dim"]
        self.is_first, self.is_last = number == 0, number == job["layers"]
        self.head_dim = job["head_dim"]
        self.wo, self.up = nn.Linear(dim, dim, False), nn.Linear(dim, ffn, False)
        self.down = nn.Linear(ffn, dim, False)
        self.q, self.k, self.v = (nn.Linear(dim, n, False) for n in (dim, kv, kv))

    def forward(self, inputs: Any, chunk: slice | None = None) -> Any:
        if self.is_first:
            hidden = self.wo(inputs)
        else:
            attended, residual = inputs
            hidden = residual + self.wo(attended)
            hidden = hidden + self.down(F.silu(self.up(hidden)))
        if self.is_last:
            return hidden
        heads = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        return (*heads, hidden)


class Attention(nn.Module):
    def mask(self, _: dict[str, Any]) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Bytes:
    """Counts the tensors of activations that graphs and the schedule hold, each storage once."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._users: Counter[int] = Counter()

    def change(self, tensor: torch.Tensor, step: int) -> None:
        storage = tensor.untyped_storage()
        before = self._users[storage.data_ptr()]
        self._users[storage.data_ptr()] += step
        if (before == 0) != (before + step == 0):
            self.held += step * storage.nbytes()
        self.peak = max(self.peak, self.held)

    def pack(self, tensor: torch.Tensor) -> Any:
        return (
            tensor if isinstance(tensor, nn.Parameter) or tensor.dim() < 3 else Saved(self, tensor)
        )

    def unpack(self, saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, Saved) else saved


class Saved:
    def __init__(self, count: Bytes, tensor: torch.Tensor) -> None:
        self.count, self.tensor = count, tensor
        count.change(tensor, 1)

    def __del__(self) -> None:
        self.count.change(self.tensor, -1)


class CountingHelix(HelixSchedule):
    """Counts what is held between passes, and apart from it what a backward pass recomputes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.between, self.within = Bytes(), Bytes()
        self.of_kind = {0: 0, 1: 0}
        self._inputs_of: dict[tuple[int, int], list[Saved]] = {}

    def _forward(self, action: Any) -> None:
        before = self.between.held
        with torch.autograd.graph.saved_tensors_hooks(self.between.pack, self.between.unpack):
            super()._forward(action)
        key = (action.stage_index, action.microbatch_index)
        if 0 < action.stage_index < self._last:
            self._inputs_of[key] = [Saved(self.between, t) for t in self._held[key].inputs]
            kind = action.stage_index % 2
            self.of_kind[kind] = max(self.of_kind[kind], self.between.held - before)

    def _backward(self, action: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self.within.pack, self.within.unpack):
            super()._backward(action)
        self._inputs_of.pop((action.stage_index, action.microbatch_index), None)


def memory(job: dict[str, Any]) -> dict[str, Any]:
    """Returns each rank's counted and simulated peaks, and what one recomputation holds, in bytes."""
    degree, num_parts = dist.get_world_size(), 2 * job["layers"] + 1

    def build(costs: Costs, chunk_tokens: int) -> CountingHelix:
        return CountingHelix(
            _stages(lambda n: Part(job, n), num_parts),
            Attention(),
            lambda count: helix(degree, count, costs),
            costs,
            lambda output, target: (output * target).sum(),
            chunk_tokens=chunk_tokens,
        )

    def run(schedule: CountingHelix, count: int) -> None:
        rows = [torch.randn(1, job["tokens"], job["dim"]) for _ in range(count)]
        schedule.run([(row,) for row in rows], [{}] * count, rows)

    plain = StageCosts(1.0, 2.0, 1.0)
    timed = Costs((plain,) * num_parts)
    alone = build(timed, 0)
    run(alone, 1)
    kinds: list[Any] = [None] * degree
    dist.all_gather_object(kinds, alone.of_kind)
    kept = [max(found[kind] for found in kinds) for kind in (0, 1)]
    # The first part keeps the tokens alone, which are given, and the last one goes back at once.
    attended = float(job["tokens"] * job["dim"] * torch.float32.itemsize)
    each = [
        StageCosts(1.0, 2.0, 1.0, activation=float(k), pending=0.0, shared=s)
        for k, s in zip(kept, (attended, 0.0), strict=True)
    ]
    parts = [each[number % 2] for number in range(num_parts)]
    parts[0] = parts[-1] = StageCosts(1.0, 2.0, 1.0, activation=0.0, pending=0.0)
    table = helix(degree, job["microbatches"], timed)
    expected = simulate(table, Costs(tuple(parts))).peaks
    found, transient = [], []
    for chunk_tokens in (0, job["chunk_tokens"]):
        schedule = build(timed, chunk_tokens)
        run(schedule, job["microbatches"])
        found.append(schedule.between.peak)
        transient.append(schedule.within.peak)
    every: list[Any] = [None] * degree
    dist.all_gather_object(every, (found, transient))
    return {
        "expected": list(expected),
        "counted": [counted[0] for counted, _ in every],
        "counted_in_chunks": [counted[1] for counted, _ in every],
        "transient": max(t[0] for _, t in every),
        "transient_in_chunks": max(t[1] for _, t in every),
        "hidden": job["tokens"] * job["dim"] * 4,
    }


def layouts(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the largest figures of all ranks in each layout."""
    import helix_layouts

    mine = helix_layouts.main(job)["results"]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    figures = ("gradients", "norm", "losses", "outputs")
    return {
        "results": [
            {f: max(of_rank[n][f] for of_rank in every) for f in figures} for n in range(len(mine))
        ]
    }


def work(settings: dict[str, Any]) -> dict[str, Any]:
    if settings["part"] != "layouts":
        dist.init_process_group("gloo")
    return {"sleeping": sleeping, "memory": memory, "layouts": layouts}[settings["part"]](settings)


if __name__ == "__main__":
    answer_job(work, opens_group=False)
