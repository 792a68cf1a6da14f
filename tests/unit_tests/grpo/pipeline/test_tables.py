# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of pipeline actions keep to formulas, to bounds of memory, and to torch's own tables."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.pipelining import schedules as torch_schedules

from torchtitan.grpo.pipeline.tables import actions, v_family
from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.improve import improve
from torchtitan.grpo.pipeline.tables.rules import (
    interleave,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
    zbv,
)
from torchtitan.grpo.pipeline.tables.simulate import peak_memory, simulate
from torchtitan.grpo.pipeline.tables.v_family import v_half, v_min, v_zb

TIMES = [(1, 1, 1), (3, 4, 2), (1, 2, 0.5)]


class StageOnPaper:
    """The attributes of a stage that torch reads when it lays out a schedule."""

    group_rank, group, is_first, is_last, has_backward = 0, None, True, False, True

    def __init__(self, degree: int, index: int, count: int) -> None:
        self.group_size, self.stage_index, self.num_stages = degree, index, count
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.device, self.submod = torch.device("cpu"), nn.Identity()


def torch_table(name: str, degree: int, microbatches: int, stages: list[int]) -> Any:
    """The passes of each rank in torch's schedule of this name, as strings."""
    total = degree * len(stages)
    on_paper: Any = [StageOnPaper(degree, index, total) for index in stages]
    schedule = getattr(torch_schedules, f"Schedule{name}")(on_paper, microbatches)
    return [
        [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        for rank in range(degree)
    ]


@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 20)])
def test_rules_that_torch_has_as_well_give_the_same_tables(degree, microbatches):
    ours = {
        "Interleaved1F1B": interleave(degree, microbatches, splits_backward=False),
        "InterleavedZeroBubble": interleave(degree, microbatches, splits_backward=True),
        "ZBVZeroBubble": zbv(degree, microbatches),
    }
    for name, table in ours.items():
        first = [i for i, rank in enumerate(table.ranks) if rank == 0]
        expected = torch_table(name, degree, microbatches, first)
        assert [[str(a) for a in actions] for actions in table.actions] == expected, name


def longest_wait(table: Table, costs: Costs) -> float:
    simulation = simulate(table, costs)
    return max(span - busy for span, busy in zip(simulation.spans, simulation.busy, strict=True))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_handcrafted_schedules_wait_as_long_as_their_formulas_say(degree, times):
    forward, back, weight = times
    costs = Costs.uniform(degree, 1, times)
    waits = {
        one_forward_one_backward: forward + back + weight,
        zb_h1: forward + back - weight,
        zb_h2: forward + back - 2 * weight,
    }
    peaks = {one_forward_one_backward: degree, zb_h1: degree, zb_h2: 2 * degree - 1}
    for make, per_rank in waits.items():
        table = make(degree, 4 * degree)
        assert longest_wait(table, costs) == pytest.approx((degree - 1) * per_rank, abs=1e-9)
        assert simulate(table, costs).peak == peaks[make]


@pytest.mark.parametrize(
    ("degree", "times"),
    [
        *itertools.product((2, 3, 4), TIMES),
        (5, (3, 4, 2)),
        *(pytest.param(8, times, marks=pytest.mark.long) for times in TIMES),
    ],
)
def test_v_schedules_hold_what_their_names_promise(degree, times):
    costs = Costs.uniform(degree, 2, times)
    bounds = {v_min: (degree + 4) // 3, v_half: (degree + 2) // 2, v_zb: degree}
    for make, bound in bounds.items():
        for microbatches in (1, degree, 3 * degree + 1):
            assert simulate(make(degree, microbatches, costs), costs).peak <= bound


@pytest.mark.parametrize(
    ("make", "times", "most"),
    [
        (v_zb, (1, 1, 1), 0.0),
        (v_half, (3, 4, 2), 0.125),
        (v_min, (1, 1, 1), 0.108),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in ((v_half, (1, 1, 1), 0.085), (v_zb, (3, 4, 2), 0.0464))
        ),
    ],
)
def test_v_schedules_on_eight_ranks_leave_little_idle(make, times, most):
    costs = Costs.uniform(8, 2, times)
    assert simulate(make(8, 32, costs), costs).span_bubble <= most + 1e-4


@pytest.mark.parametrize(
    ("degree", "times", "hop", "sizes", "shortest"),
    [
        (4, (1, 1, 1), 0.0, (), 13.5),
        (4, (1, 2, 0.5), 0.1, (), 19.45),
        (4, (3, 4, 2), 0.1, (), 43.2),
        (4, (1, 3, 1), 0.1, (), 26.7),
        (4, (3, 4, 2), 0.0, (1.2, 0.6, 1.0, 1.4), 49.1),
        (4, (1, 1, 1), 0.1, (0.7, 1.5, 0.8, 1.0), 16.1),
        *(pytest.param(8, *more, marks=pytest.mark.long) for more in (
            ((3, 4, 2), 0.1, (), 88.5),
            ((1, 1, 0.5), 0.1, (), 27.05),
            ((1, 1, 1), 0.1, (1.3, 0.7, 1.1, 0.9, 1.5, 0.6, 1.0, 1.2), 33.75),
        )),
    ],
)  # fmt: skip
def test_v_zb_with_a_microbatch_for_each_rank_is_almost_the_shortest(
    degree, times, hop, sizes, shortest
):
    """A constraint solver (OR-Tools CP-SAT) has proved that no table is shorter than ``shortest``."""
    costs = replace(Costs.uniform(degree, 2, times, hop), sizes=sizes)
    makespan = simulate(v_zb(degree, degree, costs), costs).makespan
    assert shortest - 1e-9 <= makespan <= 1.021 * shortest


@pytest.mark.parametrize("offsets", [(1, 1, 1, 1), (2, 1, 2, 1), (4, 2, 4, 2)])
@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_a_repeated_block_never_runs_two_passes_at_once_and_holds_what_is_counted(degree, offsets):
    block = v_family.building_block(degree, offsets, (0, 1, 0))
    ranks = actions.ranks_of_stages(degree, 2, "v")
    for rank in range(degree):
        cells = [cell % 6 for (stage, _), cell in block.items() if ranks[stage] == rank]
        assert sorted(cells) == list(range(6))
    # Long enough that a rank holds as many microbatches as it ever will.
    table, costs = v_family.repeated(block, degree, 12 * degree), Costs.uniform(degree, 2)
    simulate(table, costs)
    peaks = [peak_memory(of_rank, costs, table) for of_rank in table.actions]
    assert 2 * max(peaks) == v_family.held(block, degree)


def test_improvement_keeps_to_the_bound_of_memory_and_to_the_last_stages_order():
    costs = Costs.uniform(4, 2, (3, 4, 2), hop=0.3)
    before = interleave(4, 12, splits_backward=True)
    for bound in (simulate(before, costs).peak, 6.0, math.inf):
        after = improve([before], costs, bound)
        assert simulate(after, costs).makespan <= simulate(before, costs).makespan
        assert simulate(after, costs).peak <= bound
        last = [a for a in after.actions[3] if a.stage == 7 and a.kind in "FI"]
        assert last == [Action(7, kind, i) for i in range(12) for kind in ("F", "I")]


def test_of_tables_above_the_bound_the_one_that_exceeds_it_least_is_taken():
    costs = Costs.uniform(4, 1)
    best = improve([zb_h2(4, 8), zb_h1(4, 8)], costs, max_memory=1.0)
    assert simulate(best, costs).peak <= 4
