# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forward passes of other rows run in a pipeline's gaps, and change nothing but the time."""

import pytest
import torch

from torchtitan.grpo.pipeline.draw import draw_text
from torchtitan.grpo.pipeline.schedules import LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.gaps import fill_gaps
from torchtitan.grpo.pipeline.tables.simulate import simulate

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7], [3, 1, 4, 1, 5]]
ROWS = [[i % len(SEQUENCES)] for i in range(8)]


def table_of(name, ranks, microbatches, times):
    row = SCHEDULES[name]
    costs = Costs.uniform(ranks, row.stages_per_rank, times, hop=0.01)
    return row.make_table(ranks, microbatches, costs), costs


@pytest.mark.parametrize("name", [name for name in LAYER_SCHEDULES if name != "auto"])
@pytest.mark.parametrize("times", [(1, 1, 1), (0.3, 0.7, 0.2)])
def test_what_fills_gaps_delays_nothing(name, times):
    for ranks, microbatches in ((2, 4), (4, 9), (8, 16)):
        table, costs = table_of(name, ranks, microbatches, times)
        before = simulate(table, costs)
        filled = fill_gaps(table, costs, 5)
        after = simulate(filled, costs)
        for action, start in before.starts.items():
            assert after.starts[action] == pytest.approx(start, abs=1e-6)
        assert after.makespan == pytest.approx(before.makespan, abs=1e-6)
        assert after.peaks == before.peaks


def test_one_forward_one_backward_has_room_and_the_limit_holds():
    table, costs = table_of("1F1B", 4, 8, (1, 1, 1))
    assert [fill_gaps(table, costs, limit).num_gap_microbatches for limit in (0, 1, 8)] == [0, 1, 4]
    costs = Costs.uniform(4, 1, (1, 1, 1))
    filled = fill_gaps(table, costs, 8)
    assert filled.num_gap_microbatches == 4
    drawn = draw_text(filled, simulate(filled, costs), width=66).splitlines()
    # Rank 0 waits for the first gradient, and the last rank for the end of the step.
    assert drawn[0].startswith("rank  0  " + "F" * 8 + "G" * 8 + "." * 4 + "BBBB")
    assert drawn[3].endswith("BBBBGG....GGGGGG")


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, [{"pp": 2, "schedule": "1F1B"}, {"pp": 2, "schedule": "GPipe", "ac": "full"}]),
        (4, [{"pp": 4, "schedule": "VMin"}, {"pp": 2, "dp_shard": 2, "schedule": "1F1B"}]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_outputs_and_gradients_are_those_of_separate_passes(
    num_ranks, cases, make_model, run_ranks
):
    model, policy = make_model("llama", num_hidden_layers=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    reference = f"{policy}-reference"
    model.save_pretrained(reference)
    results = run_ranks(
        "gap_work", num_ranks, policy=policy, reference=reference, seq_len=12,
        sequences=SEQUENCES, rows=ROWS, cases=cases,
    )  # fmt: skip
    for of_rank in results[0]["results"]:
        for found in of_rank:
            assert found["different"] == []
            (first, _), (other_first, _) = found["done"]
            assert first == other_first > 0
            assert found["passes"] > 0
            before, *of_passes, after = found["metrics"]
            assert before == after == {}, "nothing waited"
            for metrics, num_rows in zip(of_passes, found["done"], strict=True):
                in_gaps = sum(num_rows) / found["microbatch_rows"]
                assert metrics == {"pipeline/gap_microbatches": in_gaps}
            assert found["held"] == 0
