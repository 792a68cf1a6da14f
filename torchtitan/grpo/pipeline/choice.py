# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the fastest schedules for given times within a bound on memory, and explains the choice."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.pipeline.schedules import AUTO_CANDIDATES, SCHEDULES, Schedule
from torchtitan.grpo.pipeline.tables.actions import Costs, StageCosts, Table
from torchtitan.grpo.pipeline.tables.helix import part_costs
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate

_TIMES = {"none": (1.0, 1.0, 1.0), "full": (1.0, 2.0, 0.8), "selective": (1.0, 1.5, 0.8)}
"""Relative times of F, I (with recomputation) and W, by ``activation_checkpoint.mode``.

W is slightly shorter than F, because norms and attention do not take part in it.
"""


def assumed_times(config: JobConfig) -> tuple[float, float, float]:
    return _TIMES.get(config.activation_checkpoint.mode, _TIMES["selective"])


def assumed_costs(config: JobConfig, stages_per_rank: int) -> Costs:
    degree = config.parallelism.pipeline_parallel_degree
    return Costs.uniform(degree, stages_per_rank, assumed_times(config))


def assumed_part_costs(config: JobConfig, args: Any) -> Costs:
    """Returns typical costs of HelixPipe's parts, in proportion to their FLOPs.

    ``args`` are the arguments of a model whose layers are all of one kind. The unit of memory is the
    same as for other schedules: the activations of a microbatch in a rank's layers. With other
    schedules, a recomputed layer keeps one tensor of hidden states. With HelixPipe, it keeps the
    residual stream, queries, keys, values, and the output of attention. Two ranks keep that output.
    """
    (layer,) = args.layers.kinds
    row, products = layer.attention, layer.products
    before = args.dim * row.sent
    # A causal query meets half of the keys.
    attention = row.pair_products * config.training.seq_len / 2
    per_rank = args.n_layers / config.parallelism.pipeline_parallel_degree
    recomputes = config.activation_checkpoint.mode == "full"
    attended, others = row.attended + row.sent, 4 * args.dim + layer.feed_forward.kept
    if recomputes:
        kept = ((args.dim + row.attended) / args.dim, attended / args.dim)
    else:
        kept = (others / (others + attended), attended / (others + attended))
    parts = config.parallelism.context_parallel_degree * config.parallelism.tensor_parallel_degree
    return part_costs(
        args.n_layers,
        (products / parts, 2 * products / parts),
        (attention / parts, 2.5 * attention / parts),
        before=before / products,
        recomputes=recomputes,
        kept=(kept[0] / per_rank, kept[1] / per_rank),
        shared=row.attended / (args.dim if recomputes else others + attended) / per_rank,
    )


_NEAR = 1.2
"""Schedules whose predicted time exceeds the shortest one by this factor are not tried."""


def predict(
    costs: Costs, num_ranks: int, num_microbatches: int, rows: Sequence[Schedule]
) -> dict[str, tuple[Table, Simulation]]:
    """Simulates schedules. For a schedule with half as many stages, the costs of each two are added."""
    tried = {}
    for row in rows:
        row_costs = costs_for(row, costs, num_ranks)
        table = row.make_table(num_ranks, num_microbatches, row_costs)
        tried[row.name] = table, simulate(table, row_costs)
    return tried


def choose(tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int) -> str:
    """Returns the fastest schedule within ``memory`` times 1F1B's memory, or the leanest if none fits."""
    fitting = _fitting(tried, memory, num_ranks)
    if fitting:
        return min(fitting, key=lambda name: tried[name][1].makespan)
    allowed = [name for name in tried if name in AUTO_CANDIDATES]
    return min(allowed, key=lambda name: tried[name][1].peak)


def finalists(
    tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int
) -> list[str]:
    """Returns the schedules to be measured, the fastest prediction first.

    These are all that do not split backward passes and, for each placement of stages, the fastest
    zero-bubble schedule, unless 1F1B or Interleaved1F1B fits and is faster.
    """
    makespans = {name: tried[name][1].makespan for name in _fitting(tried, memory, num_ranks)}
    if not makespans:
        return [choose(tried, memory, num_ranks)]
    layered = [SCHEDULES[name] for name in makespans if not SCHEDULES[name].divides_layers]
    whole = [makespans[row.name] for row in layered if not row.is_zero_bubble]
    # The many short passes of parts cost more than the simulator knows: whole layers are tried, too.
    longest = _NEAR * min(makespans[row.name] for row in layered) if layered else math.inf
    longest_split = min([longest, *whole])
    found: list[str] = []
    placements: set[tuple[int, str]] = set()
    for name in sorted(makespans, key=lambda name: makespans[name]):
        row = SCHEDULES[name]
        placement = row.stages_per_rank, row.placement
        if row.is_zero_bubble:
            is_tried = placement not in placements and makespans[name] <= longest_split
        else:
            is_tried = makespans[name] <= longest
        if is_tried:
            found.append(name)
            placements.add(placement)
    return found


def _fitting(
    tried: dict[str, tuple[Table, Simulation]], memory: float, num_ranks: int
) -> list[str]:
    return [
        name
        for name, (_, simulation) in tried.items()
        if name in AUTO_CANDIDATES and simulation.peak <= memory * num_ranks + 1e-9
    ]


def describe(
    tried: dict[str, tuple[Table, Simulation]],
    seconds: Mapping[str, float],
    chosen: str,
    costs: Costs,
    num_microbatches: int,
) -> str:
    each = ((s.forward, s.input_grad, s.weight_grad, s.recompute) for s in costs.stages)
    *times, recompute = (
        1000 * statistics.fmean(of_stages) for of_stages in zip(*each, strict=True)
    )
    early = f"{recompute:.3g} ms of I can run before the gradient arrives. " if recompute else ""
    predictions = ", ".join(
        f"{name} {1000 * s.makespan:.4g} ms (idle {s.bubble:.1%}, holds {s.peak:g})"
        for name, (_, s) in tried.items()
    )
    measured = ", ".join(f"{name} {1000 * took:.4g} ms" for name, took in seconds.items())
    return (
        f"The pipeline uses the schedule {chosen}. F, I and W of a stage take "
        f"{', '.join(f'{time:.3g}' for time in times)} ms on average, and a tensor takes {1000 * costs.hop:.3g} ms from rank "
        f"to rank. {early}Measured with {num_microbatches} microbatches: {measured}. "
        f"Predicted: {predictions}."
    )


def costs_for(row: Schedule, costs: Costs, num_ranks: int) -> Costs:
    """Returns the costs of a schedule's stages. A stage may consist of two measured stages."""
    if row.allows_stages(len(costs.stages), num_ranks):
        return costs
    pairs = zip(costs.stages[::2], costs.stages[1::2], strict=True)
    joined = (
        StageCosts(
            a.forward + b.forward,
            a.input_grad + b.input_grad,
            a.weight_grad + b.weight_grad,
            activation=a.activation + b.activation,
            pending=a.pending + b.pending,
            recompute=b.recompute,  # the last blocks are recomputed early
        )
        for a, b in pairs
    )
    return Costs(tuple(joined), costs.hop)
