# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The fastest schedule that fits is chosen, and the reason names what was left."""

import numpy as np
import pytest

from torchtitan.grpo.cli import run
from torchtitan.grpo.pipeline.choice import choose, describe, predict
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts


def test_with_memory_the_one_without_idle_time_is_taken():
    costs = Costs.uniform(8, 2, (1, 1, 1))
    tried = predict(costs, 32)
    assert choose(tried, 1.5, 8) == "InterleavedZeroBubble"  # the first of three equal ones
    without = {name: found for name, found in tried.items() if name != "InterleavedZeroBubble"}
    assert choose(without, 1.5, 8) == "ZBVZeroBubble"
    text = describe(tried, "VZB", costs, 32)
    assert text.startswith(
        "The pipeline takes the schedule VZB. F, I and W of a stage take 500, 500,"
    )
    assert "1F1B 1.17e+05 ms (idle 17.9%, holds 8)" in text


@pytest.mark.parametrize(("memory", "chosen"), [(0.65, "VHalf"), (0.5, "VMin"), (0.1, "VMin")])
def test_with_less_memory_one_that_fits_is_taken(memory, chosen):
    assert choose(predict(Costs.uniform(8, 2, (1, 1, 1)), 32), memory, 8) == chosen


def test_schedules_that_lose_to_one_forward_one_backward_are_not_taken():
    tried = predict(Costs.uniform(8, 2, (1, 2, 0.5)), 32)
    chosen = choose(tried, 1.0, 8)
    assert chosen not in ("VHalf", "VMin")
    assert tried[chosen][1].makespan < min(
        tried[n][1].makespan for n in ("1F1B", "Interleaved1F1B")
    )


def test_with_unequal_stages_it_is_never_slower_than_what_else_fits():
    random = np.random.default_rng(0)
    for _ in range(12):
        times = random.uniform(0.6, 1.4, (8, 3)) * random.uniform(0.5, 2, 3)
        stages = (StageCosts(*map(float, row), activation=0.5, pending=0.5) for row in times)
        costs = Costs(tuple(stages))
        tried = predict(costs, 9)
        chosen = choose(tried, 1.0, 4)
        assert tried[chosen][1].peak <= 4
        for name in ("1F1B", "Interleaved1F1B"):
            is_allowed = tried[name][1].peak <= 4
            assert tried[chosen][1].makespan <= tried[name][1].makespan or not is_allowed


def test_the_command_shows_what_would_be_chosen(capsys):
    arguments = ["train_configs/quickstart_zero_bubble.toml", "--microbatches", "3"]
    arguments += ["--parallelism.pipeline_parallel_schedule", "auto", "--times", "1", "1", "1"]
    assert run(["schedule", *arguments]) == 0
    assert (
        "For these times, auto takes InterleavedZeroBubble; a run measures its own."
        in capsys.readouterr().out
    )
