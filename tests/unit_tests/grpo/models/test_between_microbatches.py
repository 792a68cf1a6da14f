# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What FSDP2 does once in an optimizer step, and what it does for every microbatch."""

import pytest
import torch

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2], [3], [1, 3]]  # one row is a microbatch
NUM_MICROBATCHES = 4
KEPT = ["free", "keep_parameters", "keep_all"]
LORA = {"rank": 2, "base_dtype": "bfloat16"}


@pytest.fixture
def cases(make_model, run_ranks):
    """Runs a layout with all that can be kept; returns the results of rank 0."""

    def run(num_ranks, layout, kind="qwen3"):
        _, folder = make_model(kind, intermediate_size=78)
        results = run_ranks(
            "between_microbatches", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES,
            rows=ROWS, layout={"precision": "bfloat16", **layout}, kept=KEPT,
        )  # fmt: skip
        return dict(zip(KEPT, results[0]["cases"], strict=True))

    return run


def check_equal_and_clean(found):
    """Checks that all cases computed the same, with weights of now, and left nothing behind."""
    free = found["free"]
    for case in found.values():
        assert case["before"] == free["before"]
        # The gradients of microbatches are equal; their sums are rounded in another order.
        assert case["norm"] == pytest.approx(free["norm"], rel=1e-5)
        for pair in zip(case["gradients"], free["gradients"], strict=True):
            torch.testing.assert_close(*map(torch.tensor, pair), atol=1e-4, rtol=1e-4)
        before, after = torch.tensor(case["before"]), torch.tensor(case["after"])
        torch.testing.assert_close(after, torch.tensor(free["after"]), atol=2e-2, rtol=0)
        assert (after - before).abs().max() > 0.05, "outdated parameters would change nothing"
        for state in (case["state"], case["state_after_pass"]):
            assert state["gathered"] == 0 and state["unreduced"] == 0


@pytest.mark.parametrize(
    ("num_ranks", "layout", "kind"),
    [
        (2, {"dp_shard": 2}, "qwen3_tied"),
        pytest.param(2, {"dp_shard": 2, "ac": "full"}, "qwen3", marks=pytest.mark.long),
        (4, {"dp_shard": 2, "dp_replicate": 2}, "qwen3"),
        pytest.param(
            4, {"dp_shard": 2, "tp": 2, "precision": "float32"}, "qwen3", marks=pytest.mark.long
        ),
        (2, {"dp_shard": 2, "ep": 2, "precision": "float32"}, "qwen3_mixed"),
        (2, {"dp_shard": 2, "lora": LORA}, "qwen3"),
    ],
)
def test_shards_are_gathered_and_gradients_reduced_once_a_step(num_ranks, layout, kind, cases):
    found = cases(num_ranks, layout, kind)
    check_equal_and_clean(found)
    num_groups = found["free"]["state"]["num_groups"]
    # Adapters train only the groups that have some.
    num_trained = found["keep_all"]["pass_alone"]["reductions"]
    assert num_trained == (num_groups if "lora" not in layout else 3)
    for kept, case in found.items():
        keeps, alone = kept != "free", case["pass_alone"]
        if "ep" not in layout:  # which gathers numbers of tokens
            assert (alone["gathers"] == num_groups) is keeps
            assert not keeps or case["forward_alone"]["gathers"] == num_groups
            assert keeps or alone["gathers"] >= NUM_MICROBATCHES * num_groups
        times = 1 if kept == "keep_all" else NUM_MICROBATCHES
        assert alone["reductions"] == times * num_trained
        if "ep" not in layout:  # each expert is on one rank alone
            assert alone["reduce_scatters"] == times * num_trained
        if "dp_replicate" in layout:
            assert alone["all_reduces"] == num_trained, "replicas sum once in any case"


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {"dp_replicate": 2})])
def test_whole_parameters_are_cast_and_gradients_reduced_once_a_step(num_ranks, layout, cases):
    found = cases(num_ranks, layout)
    check_equal_and_clean(found)
    state = found["free"]["state"]
    casts = {kept: case["pass_alone"]["casts"] for kept, case in found.items()}
    assert casts["free"] - casts["keep_all"] == (NUM_MICROBATCHES - 1) * state["num_params"]
    assert casts["keep_parameters"] == casts["keep_all"]
    for kept, case in found.items():
        times = 1 if kept == "keep_all" else NUM_MICROBATCHES
        assert case["pass_alone"]["reductions"] == times * state["num_groups"]
        assert case["pass_alone"]["all_reduces"] == state["num_groups"]
        assert num_ranks > 1 or not case["pass_alone"].get("divisions"), "over all gradients, by 1"


@pytest.mark.parametrize(
    "schedule", [pytest.param("1F1B", marks=pytest.mark.long), "ZBVZeroBubble"]
)
def test_pipelines_gather_and_reduce_once_a_step_by_their_schedule(schedule, make_model, run_ranks):
    _, folder = make_model("qwen3", num_hidden_layers=4, intermediate_size=78)
    results = run_ranks(
        "between_microbatches", 4, model=folder, seq_len=12, sequences=SEQUENCES, rows=ROWS,
        layout={"pp": 2, "dp_shard": 2, "schedule": schedule, "precision": "bfloat16"},
    )  # fmt: skip
    for result in results:
        counts, num_groups = result["counts"], result["num_groups"]
        assert num_groups > 2
        assert counts["gathers"] == counts["reduce_scatters"] == num_groups
