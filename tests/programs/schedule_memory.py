"""Bytes that a pipeline rank holds for backward passes, against the simulator's."""

from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.models.weight_grads import WeightGradients, defer_linears
from torchtitan.grpo.pipeline.lean_stage import DeferredStage
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Costs, StageCosts
from torchtitan.grpo.pipeline.tables.simulate import simulate

DIM, TOKENS, LAYERS = 16, 32, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False)
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Bytes:
    def __init__(self, store: WeightGradients) -> None:
        self.store, self.held, self.peak, self.after_forward = store, 0, 0, 0
        self._users: Counter[int] = Counter()

    def pack(self, tensor):
        if isinstance(tensor, nn.Parameter) or tensor.dim() != 2 or tensor.shape[0] != TOKENS:
            return tensor  # parameters and their views
        return _Saved(self, tensor)

    def unpack(self, saved):
        return saved.tensor if isinstance(saved, _Saved) else saved

    def change(self, tensor, step: int) -> None:
        storage = tensor.untyped_storage()
        before = self._users[storage.data_ptr()]
        self._users[storage.data_ptr()] += step
        if (before == 0) != (before + step == 0):
            self.held += step * storage.nbytes()
        self.look()

    def look(self) -> None:
        self.peak = max(self.peak, self.held + self.store.pending_bytes)


class _Saved:
    def __init__(self, count: Bytes, tensor) -> None:
        self.count, self.tensor = count, tensor
        count.change(tensor, 1)

    def __del__(self) -> None:
        self.count.change(self.tensor, -1)


class CountingStage(DeferredStage):
    count: Bytes

    def forward_one_chunk(self, *args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(self.count.pack, self.count.unpack):
            output = super().forward_one_chunk(*args, **kwargs)
        self.count.after_forward = max(self.count.after_forward, self.count.held)
        return output

    def backward_one_chunk(self, *args, **kwargs):
        super().backward_one_chunk(*args, **kwargs)
        self.count.look()


def peak_of(name: str, microbatches: int, costs: Costs | None) -> tuple[int, float, Bytes]:
    row, degree, rank = SCHEDULES[name], dist.get_world_size(), dist.get_rank()
    per_rank = row.stages_per_rank
    timed = Costs.uniform(degree, per_rank)
    ranks = row.make_table(degree, microbatches, timed).ranks
    store = WeightGradients()
    count = Bytes(store)
    stages = []
    for index in [index for index, holder in enumerate(ranks) if holder == rank]:
        module = nn.Sequential(*(Layer() for _ in range(LAYERS // len(ranks))))
        if row.is_zero_bubble:
            defer_linears(module, store)
        stage = PipelineStage(module, index, len(ranks), torch.device("cpu"))
        stages.append(CountingStage(stage, store))
        if not row.is_zero_bubble:
            stages[-1].dw_builder = None
        stages[-1].count = count
    schedule = TableSchedule(
        stages, lambda m: row.make_table(degree, m, timed), timed,
        lambda output, target: (output * target).sum(),
    )  # fmt: skip
    rows = torch.randn(microbatches, TOKENS, DIM)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def run(inputs) -> None:
        targets = [torch.ones(TOKENS, DIM)] * len(inputs) if last else None
        schedule.run([(x.clone().requires_grad_(),) if first else () for x in inputs],
                     [{}] * len(inputs), targets)  # fmt: skip

    run(rows[:1])  # infers shapes
    count.peak = store.peak_bytes = 0
    run(rows)
    expected = 0.0
    if costs is not None:
        table = row.make_table(degree, microbatches, timed)
        expected = simulate(table, costs).peaks[rank]
    return count.peak, expected, count


def main(arguments):
    dist.init_process_group("gloo")
    results = {}
    for name in arguments["schedules"]:
        row = SCHEDULES[name]
        # Of one microbatch alone, all stages are held after the last forward pass, and weight
        # gradients of one stage wait at a time under ZBVZeroBubble.
        _, _, count = peak_of("ZBVZeroBubble" if row.is_zero_bubble else name, 1, None)
        per_stage, pending = count.after_forward / row.stages_per_rank, count.store.peak_bytes
        num_stages = dist.get_world_size() * row.stages_per_rank
        stage = StageCosts(1, 1, 1, activation=per_stage, pending=pending)
        measured, expected, _ = peak_of(
            name, arguments["microbatches"], Costs((stage,) * num_stages)
        )
        results[name] = {"measured": measured, "expected": expected} | vars(stage)
    return results
