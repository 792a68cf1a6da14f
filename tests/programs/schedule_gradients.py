"""Gradients of every schedule for random numbers of microbatches and times, against plain sums."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.models.weight_grads import WeightGradients, defer_linears
from torchtitan.grpo.pipeline.lean_stage import DeferredStage, LeanStage
from torchtitan.grpo.pipeline.schedules import AUTO, LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Costs

DIM = 6


class Part(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.up, self.norm = nn.Linear(DIM, 2 * DIM), nn.RMSNorm(DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, hidden, shift):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden)) + shift))


def loss_of(output, target):
    return ((output - target) ** 2).sum()


def largest_distance(name: str, microbatches: int, times: list[float]) -> float:
    row, degree, rank = SCHEDULES[name], dist.get_world_size(), dist.get_rank()
    per_rank = row.stages_per_rank
    costs = Costs.uniform(degree, per_rank, times, hop=0.1)
    ranks = row.make_table(degree, microbatches, costs).ranks
    torch.manual_seed(microbatches)
    rows, targets, shifts = torch.randn(3, microbatches, 2, 3, DIM)
    shifts = shifts[..., :1]

    plain = [Part(index) for index in range(len(ranks))]
    for i in range(microbatches):
        hidden = rows[i]
        for part in plain:
            hidden = part(hidden, shifts[i])
        loss_of(hidden, targets[i]).backward()

    store, parts, stages = WeightGradients(), {}, []
    for index in [index for index, holder in enumerate(ranks) if holder == rank]:
        parts[index] = Part(index)
        if row.is_zero_bubble:
            defer_linears(parts[index], store)
        stage = PipelineStage(parts[index], index, len(ranks), torch.device("cpu"))
        stages.append(DeferredStage(stage, store) if row.is_zero_bubble else LeanStage.like(stage))
    schedule = TableSchedule(
        stages, lambda count: row.make_table(degree, count, costs), costs, loss_of
    )
    inputs = [(row.clone(),) if 0 in parts else () for row in rows]
    named = [{"shift": shift} for shift in shifts]
    schedule.run(inputs, named, list(targets) if len(ranks) - 1 in parts else None)
    store.check_empty()
    return max(
        float((ours.grad - theirs.grad).norm() / theirs.grad.norm())
        for index, part in parts.items()
        for ours, theirs in zip(part.parameters(), plain[index].parameters(), strict=True)
    )


def main(arguments):
    dist.init_process_group("gloo")
    random = np.random.default_rng(dist.get_world_size())
    distances = {}
    for _ in range(arguments["tries"]):
        microbatches = int(random.integers(1, 4 * dist.get_world_size()))
        times = [float(time) for time in random.uniform(0.3, 3, 3)]
        for name in LAYER_SCHEDULES:
            if name != AUTO:
                key = f"{name}, {microbatches} microbatches, times {times}"
                distances[key] = largest_distance(name, microbatches, times)
    return {"distances": distances}
