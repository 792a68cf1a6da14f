# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The fastest schedule that fits is chosen, and the reason names what was left."""

import functools

import numpy as np
import pytest

from torchtitan.grpo.pipeline.choice import choose, describe, finalists, predict
from torchtitan.grpo.pipeline.schedules import SCHEDULES, candidates, measured_with
from torchtitan.grpo.pipeline.tables.actions import Costs, StageCosts, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation


@functools.cache
def predicted(times: tuple[float, float, float]) -> dict[str, tuple[Table, Simulation]]:
    """Returns all schedules of eight ranks and 32 microbatches, which take seconds to make."""
    return predict(Costs.uniform(8, 2, times), 8, 32, candidates(8))


def test_with_memory_the_one_without_idle_time_is_taken():
    costs, tried = Costs.uniform(8, 2, (1, 1, 1)), predicted((1, 1, 1))
    assert choose(tried, 1.5, 8) == "InterleavedZeroBubble"  # the first of three equal ones
    without = {name: found for name, found in tried.items() if name != "InterleavedZeroBubble"}
    assert choose(without, 1.5, 8) == "ZBVZeroBubble"
    for memory, chosen in ((0.65, "VHalf"), (0.5, "VMin"), (0.1, "VMin")):
        assert choose(tried, memory, 8) == chosen
    text = describe(tried, {"VZB": 3.5, "1F1B": 4.0}, "VZB", costs, 32)
    assert text.startswith("The pipeline uses the schedule VZB. F, I and W of a stage take 500,")
    assert "Measured with 32 microbatches: VZB 3500 ms, 1F1B 4000 ms." in text
    assert "1F1B 1.17e+05 ms (idle 17.9%, holds 8)" in text


@pytest.mark.parametrize(
    ("times", "memory", "expected"),
    [
        # All others hold too much.
        ((1, 1, 1), 0.6, ["VMin"]),
        ((1, 1, 1), 1.5,
         ["InterleavedZeroBubble", "ZBVZeroBubble", "ZBH1", "Interleaved1F1B", "1F1B"]),
        # Those of a V, and those with one stage a rank, lose to Interleaved1F1B.
        ((3, 4, 0.1), 1.5, ["InterleavedZeroBubble", "Interleaved1F1B", "1F1B"]),
    ],
)  # fmt: skip
def test_the_fastest_of_each_placement_and_those_without_split_passes_are_tried(
    times, memory, expected
):
    assert finalists(predicted(times), memory, 8) == expected


def test_with_unequal_stages_only_near_schedules_are_tried_and_none_that_loses_to_another():
    random, plain = np.random.default_rng(1), ("1F1B", "Interleaved1F1B")
    for _ in range(6):
        times = random.uniform(0.6, 1.4, (8, 3)) * random.uniform(0.5, 2, 3)
        stages = (StageCosts(*map(float, row), activation=0.5, pending=0.5) for row in times)
        tried = predict(Costs(tuple(stages)), 4, 9, candidates(4))
        makespan = {name: simulation.makespan for name, (_, simulation) in tried.items()}
        found = finalists(tried, 1.5, 4)
        assert found[0] == choose(tried, 1.5, 4)
        makespans = [makespan[name] for name in found]
        assert makespans == sorted(makespans)
        assert makespans[-1] <= 1.2 * makespans[0]
        best = min(makespan[n] for n in plain)
        assert all(makespan[name] <= best for name in {*found} - {*plain})
        chosen = choose(tried, 1.0, 4)
        assert tried[chosen][1].peak <= 4
        fitting = [name for name in plain if tried[name][1].peak <= 4]
        assert all(makespan[chosen] <= makespan[name] for name in fitting)


@pytest.mark.parametrize(
    ("per_rank", "names"),
    [
        (1, ["1F1B", "ZBH1", "ZBH2"]),
        (2, ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "VZB", "VHalf", "VMin"]),
        (3, ["Interleaved1F1B", "InterleavedZeroBubble"]),
    ],
)
def test_a_fixed_number_of_stages_leaves_the_schedules_that_can_run_it(per_rank, names):
    assert [row.name for row in candidates(4, 4 * per_rank)] == names
    assert SCHEDULES["auto"].allows_stages(4 * per_rank, 4)
    assert measured_with(per_rank).allows_stages(4 * per_rank, 4)
    costs = Costs.uniform(4, per_rank, (1, 1, 1))
    tried = predict(costs, 4, 8, candidates(4, 4 * per_rank))
    assert list(tried) == names
    for table, simulation in tried.values():
        assert table.num_stages == 4 * per_rank
        assert sum(simulation.busy) == pytest.approx(4 * 8 * 3), "all layers count, however cut"
    assert candidates(4, 6) == []
    assert not SCHEDULES["auto"].allows_stages(6, 4)
