# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One pipeline runs passes of any length, and holds nothing for microbatches that are done."""

import inspect

import pytest
from torch.distributed.pipelining import PipelineStage, stage

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7], [3, 1, 4, 1, 5]]


@pytest.mark.parametrize(
    ("schedule", "compiled"),
    [("1F1B", False), ("ZBVZeroBubble", False), ("auto", False), ("auto", True)],
)
def test_passes_of_any_length_give_the_same_sums_without_inferring_shapes_again(
    schedule, compiled, make_model, run_ranks, tmp_path
):
    _, folder = make_model("llama", num_hidden_layers=4)
    results = run_ranks(
        "lean_pipeline", 2, model=folder, seq_len=12, sequences=SEQUENCES, schedule=schedule, folder=str(tmp_path),
        compiled=compiled,
        rows=[[0], [1], [2], [3], [4]], cuts=[[], [2], [1, 4], [1, 2, 3, 4]],
    )  # fmt: skip
    for result in results:
        assert result["inferences"] == result["num_stages"]
        assert max(result["distances"]) < 1e-6
        whole, *others = result["logprobs"]
        assert all(other == whole for other in others)
        assert not any(result["held"][: result["num_stages"] // 2])
    if schedule == "auto":
        (chosen,) = {result["schedule"] for result in results}
        report = (tmp_path / "pipeline_schedule.txt").read_text()
        assert report.startswith(f"The pipeline takes the schedule {chosen}. F, I and W of a stage")
        assert "Predicted for 8 microbatches: 1F1B" in report and "\nrank  1  " in report
        assert (tmp_path / "pipeline_schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name",
    ["get_fwd_send_ops", "get_bwd_send_ops", "forward_one_chunk", "backward_one_chunk"],
)
def test_torch_has_the_method_that_the_lean_stage_replaces(name):
    assert callable(getattr(PipelineStage, name))


def test_torch_has_the_attributes_that_the_lean_stage_replaces():
    source = inspect.getsource(stage)
    for name in ("args_recv_info", "grad_recv_info", "chunks", "fwd_cache"):
        assert f"self.{name}:" in source, name
