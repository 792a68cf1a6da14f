# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Zero-bubble schedules compute the gradients of Interleaved1F1B, to the bit."""

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.pipeline.deferred_stage import SUMS_IN_GRAD

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
PLAIN = {"pp": 2, "schedule": "Interleaved1F1B"}
ZBV = {"pp": 2, "schedule": "ZBVZeroBubble"}
IZB = {"pp": 2, "schedule": "InterleavedZeroBubble"}


@pytest.fixture
def compared(make_model, run_ranks):
    """Runs cases on two or more ranks and returns the figures of each, from rank 0."""

    def compare(num_ranks, *cases):
        _, folder = make_model("qwen3", num_hidden_layers=4, intermediate_size=78)
        (result, *_) = run_ranks(
            "deferred_gradients", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES,
            rows=[[0], [1], [2], [3]], cases=cases,
        )  # fmt: skip
        return result["results"]

    return compare


@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("full", 2), ("selective op", 2)])
def test_gradients_are_equal_and_a_checkpointed_block_runs_twice(compared, mode, forwards):
    results = compared(2, *({**case, "ac": mode} for case in (PLAIN, ZBV, IZB)))
    for result in results:
        assert result["different"] == []
        assert result["forwards"] == forwards
        assert result["pending_bytes"] == 0


@pytest.mark.parametrize("mode", ["full", "selective op"])
def test_blocks_are_recomputed_while_the_gradient_is_on_its_way(compared, mode):
    plain = [{**PLAIN, "ac": mode, "early": early} for early in (0, 1, -1)]
    zero_bubble = [{**case, "ac": mode, "early": -1} for case in (ZBV, IZB)]
    one_f_one_b = {"pp": 2, "schedule": "1F1B", "ac": mode, "early": -1}
    none, *others = compared(2, *plain, *zero_bubble, one_f_one_b)
    assert none["recomputed_before_gradient"] == 0
    for found in others:
        assert found["recomputed_before_gradient"] > 0
        assert found["different"] == []
        assert found["forwards"] == 2


def test_without_checkpoints_nothing_is_recomputed(compared):
    (found,) = compared(2, {**ZBV, "early": -1})
    assert (found["forwards"], found["recomputed_before_gradient"]) == (1, 0)


def test_pending_bytes_are_bounded_and_the_gradients_stay(compared):
    _, free, bounded, none = compared(2, PLAIN, ZBV, {**ZBV, "bound": 20_000}, {**ZBV, "bound": 0})
    assert free["peak_bytes"] > 20_000 >= bounded["peak_bytes"] > none["peak_bytes"] == 0
    assert bounded["different"] == none["different"] == []


def test_mixed_precision_adds_microbatches_up_in_the_dtype_of_the_reduction(compared):
    cases = [{**case, "precision": "bfloat16"} for case in (PLAIN, ZBV, IZB)]
    cases += [{**cases[1], "bound": 20_000}, {**cases[1], "torch_split": True}]
    _, zbv, izb, bounded, by_torch = compared(2, *cases)
    assert zbv["different"] == izb["different"] == bounded["different"] == []
    # Torch's own split does so from release 2.15 on, too.
    assert by_torch["distance"] == 0 if SUMS_IN_GRAD else by_torch["distance"] > 1e-4


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "precision": "bfloat16"}, {"tp": 2}])
def test_sharded_stages_have_equal_gradients(compared, layout):
    for result in compared(4, *({**case, **layout, "ac": "full"} for case in (PLAIN, ZBV))):
        assert result["different"] == []
        assert result["forwards"] == 2


@pytest.mark.parametrize(
    ("num_ranks", "tries"),
    [
        (2, 4),
        (4, 3),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((2, 7), (3, 7), (4, 6))),
    ],
)
def test_all_schedules_have_the_gradients_of_plain_accumulation(num_ranks, tries, run_ranks):
    for result in run_ranks("schedule_gradients", num_ranks, tries=tries):
        assert len(result["distances"]) >= 10 * (tries - 1)
        assert {case: d for case, d in result["distances"].items() if not d < 1e-6} == {}


def test_v_schedules_on_four_ranks_are_equal_to_the_bit(make_model, run_ranks):
    _, folder = make_model("qwen3", num_hidden_layers=8, intermediate_size=78)
    cases = [
        {"pp": 4, "schedule": schedule, "ac": "full"}
        for schedule in ("Interleaved1F1B", "VMin", "VHalf", "VZB")
    ]
    (result, *_) = run_ranks(
        "deferred_gradients", 4, model=folder, seq_len=12, sequences=SEQUENCES,
        rows=[[0], [1], [2], [3]], cases=cases,
    )  # fmt: skip
    for found in result["results"]:
        assert found["different"] == []
        assert found["forwards"] == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PipelineStage, "forward_one_chunk"),
        (PipelineStage, "backward_one_chunk"),
        (PipelineStage, "forward_maybe_with_nosync"),
        (PipelineStage, "backward_maybe_with_nosync"),
        (PipelineStage, "perform_reduce_grad"),
        (FSDPModule, "_get_fsdp_state"),
        *(
            [(PipelineStage, "start_gradient_reduction")]
            if SUMS_IN_GRAD
            else [
                (FSDPParam, "accumulate_unsharded_grad_if_needed"),
                (FSDPParam, "to_accumulated_grad_if_needed"),
            ]
        ),
    ],
)
def test_torch_has_the_private_name_that_the_deferred_stage_uses(owner, name):
    assert callable(getattr(owner, name))
