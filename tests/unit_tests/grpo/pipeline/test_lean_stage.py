# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One pipeline runs passes of any length, and holds nothing for microbatches that are done."""

import re

import pytest

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7], [3, 1, 4, 1, 5]]


@pytest.fixture
def pipeline(make_model, run_ranks, tmp_path):
    def run(schedule, rows, cuts, **more):
        _, folder = make_model("llama", num_hidden_layers=4)
        return run_ranks(
            "lean_pipeline", 2, model=folder, seq_len=12, sequences=SEQUENCES, schedule=schedule,
            folder=str(tmp_path), rows=rows, cuts=cuts, **{"compiled": False} | more,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("schedule", "compiled"),
    [
        pytest.param("1F1B", False, marks=pytest.mark.long),
        ("ZBVZeroBubble", False),
        pytest.param("auto", True, marks=pytest.mark.long),
    ],
)
def test_passes_of_any_length_give_the_same_sums_without_inferring_shapes_again(
    schedule, compiled, pipeline
):
    rows, cuts = [[0], [1], [2], [3], [4]], [[], [2], [1, 4], [1, 2, 3, 4]]
    for result in pipeline(schedule, rows, cuts, compiled=compiled):
        assert result["inferences"] == result["num_stages"]
        assert max(result["distances"]) < 1e-6
        whole, *others = result["logprobs"]
        assert all(other == whole for other in others)
        assert not any(result["held"][: result["num_stages"] // 2])


def test_auto_measures_how_long_a_tensor_takes_from_rank_to_rank(make_model, run_ranks, tmp_path):
    """The middle one of three ranks exchanges tensors with both of the others."""
    _, folder = make_model("llama", num_hidden_layers=4)
    results = run_ranks("slow_connection", 3, model=folder, seconds=0.01, folder=str(tmp_path))
    assert len({result["schedule"] for result in results}) == 1
    report = (tmp_path / "pipeline_schedule.txt").read_text()
    hop = re.search(r"a tensor takes (\S+) ms from rank to rank", report)
    assert hop is not None and float(hop[1]) >= 10
    # What checkpointed blocks take again can be computed without a gradient.
    recompute, input_grad = results[0]["recompute"], results[0]["input_grad"]
    assert max(recompute) > 0
    assert all(early < whole for early, whole in zip(recompute, input_grad, strict=True))
    assert "ms of I can run before the gradient arrives" in report


@pytest.mark.parametrize(
    ("layers_per_stage", "stages_per_rank", "names"),
    [
        pytest.param(3, 1, {"1F1B", "ZBH1", "ZBH2"}, marks=pytest.mark.long),
        (1, 3, {"Interleaved1F1B", "InterleavedZeroBubble"}),
    ],
)
def test_auto_chooses_among_schedules_with_the_configured_stages(
    layers_per_stage, stages_per_rank, names, pipeline, tmp_path
):
    """The embedding and the output layer count as layers, so that six are cut."""
    results = pipeline("auto", [[0], [1], [2]], [[], [1]], layers_per_stage=layers_per_stage)
    assert all(max(result["distances"]) < 1e-6 for result in results)
    (chosen,) = {result["schedule"] for result in results}
    assert chosen in names
    # Those of the training passes and those of forward passes alone.
    assert [result["num_stages"] for result in results] == [2 * stages_per_rank] * 2
    report = (tmp_path / "pipeline_schedule.txt").read_text()
    assert report.startswith(f"The pipeline uses the schedule {chosen}. F, I and W of a stage")
    assert "Measured with 8 microbatches: " in report and "\nrank  1  " in report
    predicted = report.partition("Predicted: ")[2].split("\n")[0]
    assert {part.split()[0] for part in predicted.split("), ")} == names
    assert (tmp_path / "pipeline_schedule.png").read_bytes().startswith(b"\x89PNG")
