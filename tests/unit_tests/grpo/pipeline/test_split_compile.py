# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compiled zero-bubble pipelines have the gradients of compiled Interleaved1F1B, to the bit."""

import pytest

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
PLAIN = {"pp": 2, "schedule": "Interleaved1F1B", "compiled": True}
ZBV = {"pp": 2, "schedule": "ZBVZeroBubble", "compiled": True}
NUM_LINEARS = 7
"""Linear layers of a block. Each needs a product for its input's gradient."""


@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_recomputed"),
    [
        # All products but the last one of the block, whose output nothing needs, once.
        pytest.param({"ac": "full"}, 2, NUM_LINEARS - 1, marks=pytest.mark.long),
        # Every second product is saved.
        pytest.param({"ac": "selective op"}, 2, 3, marks=pytest.mark.long),
        ({"ac": "full", "dp_shard": 2, "precision": "bfloat16"}, 4, NUM_LINEARS - 1),
        pytest.param({"tp": 2}, 4, 0, marks=pytest.mark.long),
        pytest.param({"schedule": "InterleavedZeroBubble"}, 2, 0, marks=pytest.mark.long),
        pytest.param({"schedule": "VHalf"}, 2, 0, marks=pytest.mark.long),
        pytest.param({"attention": "varlen"}, 2, 0, marks=pytest.mark.long),
    ],
    ids=["full", "op", "FSDP2 full bfloat16", "TP", "interleaved", "V-Half", "varlen"],
)
def test_gradients_are_equal_and_deferred(layout, num_ranks, num_recomputed, make_model, run_ranks):
    _, folder = make_model("qwen3", num_hidden_layers=4, intermediate_size=78)
    (result, *_) = run_ranks(
        "deferred_gradients", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES,
        rows=[[0], [1], [2], [3]], cases=[layout | PLAIN, ZBV | layout],
    )  # fmt: skip
    _, zbv = result["results"]
    assert zbv["different"] == []
    # All blocks, microbatches and steps share one graph.
    assert zbv["graphs"] == 1
    (graph,) = zbv["split"]
    assert graph == {
        "linears": NUM_LINEARS,
        "deferred": NUM_LINEARS,
        "products": NUM_LINEARS + num_recomputed,
    }
    assert zbv["peak_bytes"] > 0 == zbv["pending_bytes"]
