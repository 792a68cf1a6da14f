# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Muon takes the same steps under every layout, and resumes from the checkpoint of another."""

import pytest

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2, 3], [], []]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "muon_lr": 2e-2, "muon_dtype": "float32"}
# A gradient's last bits grow in the iteration, by up to its slope at 0 (about 500 after 5 steps).
BOUND = 5e-3


@pytest.mark.parametrize(
    ("kind", "num_ranks", "layouts"),
    [
        (
            "qwen3",
            2,
            {
                "fsdp2": {"dp_shard": 2},
                "tp2": {"tp": 2},
                "replicate2": {"dp_replicate": 2},
                "pp2 in a V": {"pp": 2, "schedule": "ZBVZeroBubble"},
            },
        ),
        (
            "qwen3",
            4,
            {
                "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
                "fsdp2 tp2": {"dp_shard": 2, "tp": 2},
                "fsdp2 pp2": {"dp_shard": 2, "pp": 2, "schedule": "1F1B"},
            },
        ),
        (
            "qwen3_mixed",
            4,
            {
                "fsdp4 ep2": {"dp_shard": 4, "ep": 2},
                "fsdp2 ep2 etp2": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
            },
        ),
    ],
)
def test_steps_are_those_of_one_process(kind, num_ranks, layouts, make_model, run_ranks, tmp_path):
    _, folder = make_model(kind, num_hidden_layers=4, intermediate_size=78)
    common = {"model": folder, "seq_len": 12, "sequences": SEQUENCES, "rows": ROWS}
    common |= {"optimizer": SETTINGS, "reference": str(tmp_path)}
    (reference,) = run_ranks("muon_ranks", 1, layouts={}, **common)
    assert reference["kinds"] == ["AdamW", "Muon"]
    assert "state.layers.0.attention.wq.weight.momentum_buffer" in reference["state"]
    assert "state.tok_embeddings.weight.exp_avg_sq" in reference["state"]
    results = run_ranks("muon_ranks", num_ranks, layouts=layouts, **common)
    for name in layouts:
        held = {key for result in results for key in result[name]["trained"]}
        assert len(held) >= 4 * 9 + 3, "the ranks together hold the whole model"
        for way in ("trained", "resumed"):
            found = {k: e for result in results for k, e in result[name][way].items()}
            assert not {k: e for k, e in found.items() if not e < BOUND}, (name, way)
