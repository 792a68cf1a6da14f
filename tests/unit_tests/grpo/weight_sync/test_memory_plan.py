# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the push will hold is told before the run, and is what it then holds."""

import pytest

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.weight_sync.memory_plan import describe_placement

# Large enough, so that other memory of a process does not matter.
SIZES = {"hidden_size": 288, "intermediate_size": 768, "vocab_size": 8000}


@pytest.mark.parametrize(
    ("kind", "layout", "on_gpu"),
    [
        ("qwen3", {}, False),
        ("llama", {"dp_shard": 2}, False),
        ("qwen3", {"pp": 2}, False),
        ("llama", {"tp": 2}, True),
        ("qwen3", {"dp_shard": 2, "tp": 2}, True),
    ],
)
def test_the_memory_that_was_predicted_is_counted(kind, layout, on_gpu, make_model, run_ranks):
    _, folder = make_model(kind, **SIZES)
    num_ranks = 1
    for degree in layout.values():
        num_ranks *= degree
    results = run_ranks("push_memory", num_ranks, model=folder, layout=layout, on_gpu=on_gpu)
    predicted = results[0]["predicted"]
    assert sum(result["counted"] for result in results) == pytest.approx(predicted, rel=0.05)
    assert results[0]["planned"] == pytest.approx(predicted, rel=0.05)
    ours, planned = results[0]["buckets"]
    assert ours == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "is_open"),
    [("auto", None, True), ("auto", 3, False), ("auto", 1, False), ("VZB", None, False)],
)
def test_it_is_said_for_which_placement_of_stages_the_figures_are(
    schedule, layers_per_stage, is_open
):
    # One stage a rank, or three of them, can only be placed in one way.
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_layers_per_stage = layers_per_stage
    lines = list(describe_placement(config, 4))
    assert len(lines) == is_open
    for line in lines:
        assert line.startswith("(for 2 stages a rank in a V: the schedule is not chosen yet")
        assert "parallelism.pipeline_parallel_schedule = 'auto'" in line
    config.parallelism.pipeline_parallel_degree = 1
    assert list(describe_placement(config, 4)) == []
