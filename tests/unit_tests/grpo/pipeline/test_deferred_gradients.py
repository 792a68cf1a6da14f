# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Zero-bubble schedules compute the gradients of Interleaved1F1B, to the bit."""

import itertools

import pytest

from torchtitan.grpo.pipeline.lean_stage import SUMS_IN_GRAD

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
PLAIN = {"pp": 2, "schedule": "Interleaved1F1B"}
ZBV = {"pp": 2, "schedule": "ZBVZeroBubble"}
IZB = {"pp": 2, "schedule": "InterleavedZeroBubble"}
NUM_LINEARS = 7  # of a block, each with a product for its input's gradient


@pytest.fixture
def compared(make_model, run_ranks):
    """Runs groups of cases in one start of the ranks; returns the figures of each, from rank 0.

    Gradients are compared with those of the first case of their group.
    """

    def compare(num_ranks, *groups, num_layers=4, kind="qwen3"):
        _, folder = make_model(kind, num_hidden_layers=num_layers, intermediate_size=78)
        (result, *_) = run_ranks(
            "deferred_gradients", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES,
            rows=[[0], [1], [2], [3]], groups=groups,
        )  # fmt: skip
        return result["groups"]

    return compare


def test_gradients_are_equal_with_a_bound_of_memory_and_with_mixed_precision(compared):
    plain = [PLAIN, ZBV, IZB, {**ZBV, "early": -1}]
    bounds = [PLAIN, ZBV, {**ZBV, "bound": 20_000}, {**ZBV, "bound": 0}]
    mixed = [{**case, "precision": "bfloat16"} for case in (PLAIN, ZBV, IZB)]
    mixed += [{**mixed[1], "bound": 20_000}, {**mixed[1], "torch_split": True}]
    of_plain, of_bounds, of_mixed = compared(2, plain, bounds, mixed)
    for result in of_plain:
        assert result["different"] == []
        assert (result["forwards"], result["recomputed_before_gradient"]) == (1, 0)
        assert result["pending_bytes"] == 0
    _, free, bounded, none = of_bounds
    assert free["peak_bytes"] > 20_000 >= bounded["peak_bytes"] > none["peak_bytes"] == 0
    assert bounded["different"] == none["different"] == []
    _, zbv, izb, bounded, by_torch = of_mixed
    assert zbv["different"] == izb["different"] == bounded["different"] == []
    # Torch's own split does so from release 2.15 on, too.
    assert by_torch["distance"] == 0 if SUMS_IN_GRAD else by_torch["distance"] > 1e-4


@pytest.mark.parametrize("mode", ["full", pytest.param("selective op", marks=pytest.mark.long)])
def test_a_checkpointed_block_runs_twice_and_early_while_the_gradient_is_on_its_way(compared, mode):
    cases = [{**PLAIN, "early": 0}, PLAIN, ZBV]  # by default, one block is recomputed early
    cases += [{**case, "early": -1} for case in (ZBV, IZB, {"pp": 2, "schedule": "1F1B"})]
    ((none, *others),) = compared(2, [{**case, "ac": mode} for case in cases])
    assert none["recomputed_before_gradient"] == 0
    for found in others:
        assert found["recomputed_before_gradient"] > 0
        assert (found["different"], found["forwards"], found["pending_bytes"]) == ([], 2, 0)


def test_on_four_ranks_tensor_parallel_stages_and_v_schedules_have_equal_gradients(compared):
    groups = [[{**case, "tp": 2, "ac": "full"} for case in (PLAIN, ZBV)]]
    schedules = ("Interleaved1F1B", "VMin", "VHalf", "VZB")
    groups.append([{"pp": 4, "schedule": schedule, "ac": "full"} for schedule in schedules])
    for result in itertools.chain(*compared(4, *groups, num_layers=8)):
        assert (result["different"], result["forwards"]) == ([], 2)


def test_experts_have_equal_gradients(compared):
    """Of a model with dense layers as well, which are sharded with them."""
    modes = ({"ac": "full"}, {"precision": "bfloat16"})
    groups = [[PLAIN | mode, ZBV | mode] for mode in modes]
    for found in compared(2, *groups, kind="qwen3_mixed"):
        assert all(result["different"] == [] for result in found)
    shards = {"dp_shard": 2, "precision": "bfloat16"}
    layouts = (shards, shards | {"ep": 2}, {"tp": 2})
    groups = [[case | of | {"ac": "full"} for case in (PLAIN, ZBV)] for of in layouts]
    *sharded, (_, by_tensor) = compared(4, *groups, kind="qwen3_mixed")
    for found in sharded:
        assert all(result["different"] == [] for result in found)
    # A CPU's products of ten columns depend on where in memory they begin.
    assert by_tensor["distance"] < 1e-5


@pytest.mark.parametrize(
    ("num_ranks", "tries"),
    [
        (2, 3),
        (4, 2),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((2, 7), (3, 7), (4, 6))),
    ],
)
def test_all_schedules_have_the_gradients_of_plain_accumulation(num_ranks, tries, run_ranks):
    for result in run_ranks("schedule_gradients", num_ranks, tries=tries):
        assert len(result["distances"]) >= 10 * (tries - 1)
        assert {case: d for case, d in result["distances"].items() if not d < 1e-6} == {}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_recomputed"),
    [
        # All products but the last one of the block, whose output nothing needs, once.
        pytest.param({"ac": "full"}, 2, NUM_LINEARS - 1, marks=pytest.mark.long),
        # Every second product is saved.
        ({"ac": "selective op"}, 2, 3),
        ({"ac": "full", "dp_shard": 2, "precision": "bfloat16"}, 4, NUM_LINEARS - 1),
        pytest.param({"tp": 2}, 4, 0, marks=pytest.mark.long),
        pytest.param({"schedule": "InterleavedZeroBubble"}, 2, 0, marks=pytest.mark.long),
        pytest.param({"schedule": "VHalf"}, 2, 0, marks=pytest.mark.long),
        pytest.param({"attention": "varlen"}, 2, 0, marks=pytest.mark.long),
    ],
    ids=["full", "op", "FSDP2 full bfloat16", "TP", "interleaved", "V-Half", "varlen"],
)
def test_compiled_gradients_are_equal_and_deferred(layout, num_ranks, num_recomputed, compared):
    cases = [{**layout, **PLAIN}, {**ZBV, **layout}]
    ((_, zbv),) = compared(num_ranks, [{**case, "compiled": True} for case in cases])
    assert zbv["different"] == []
    # All blocks, microbatches and steps share one graph.
    assert zbv["graphs"] == 1
    linears = {"linears": NUM_LINEARS, "deferred": NUM_LINEARS}
    assert zbv["split"] == [linears | {"products": NUM_LINEARS + num_recomputed}]
    assert zbv["peak_bytes"] > 0 == zbv["pending_bytes"]


def test_saved_bytes_follow_the_simulator(run_ranks):
    names = ["1F1B", "ZBVZeroBubble", "VHalf", "VMin"]
    results = run_ranks("schedule_memory", 4, schedules=names, microbatches=12)
    peaks = dict.fromkeys(names, 0.0)
    for result in results:
        for name in names:
            measured, expected = result[name]["measured"], result[name]["expected"]
            assert abs(measured / expected - 1) < 0.05, (name, result[name])
            peaks[name] = max(peaks[name], measured)
    assert peaks["VMin"] < 0.8 * peaks["VHalf"] < 0.8 * peaks["ZBVZeroBubble"]
