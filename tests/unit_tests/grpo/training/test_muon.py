# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Muon: against torch's, against singular values, for batches of matrices, under every layout."""

import pytest
import torch

from torchtitan.grpo.training.muon import Muon, newton_schulz

SHAPES = [(12, 12), (24, 8), (8, 24), (7, 5)]


def steps(optimizer: torch.optim.Optimizer, parameters, num_steps: int = 4) -> None:
    torch.manual_seed(1)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()


def parameters_of(shapes) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize("kind", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_in_one_process_it_is_torchs_bit_for_bit(kind, nesterov):
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine, theirs = parameters_of(SHAPES), parameters_of(SHAPES)
    steps(Muon(mine, **settings, ns_steps=4, adjust_lr_fn=kind), mine)
    steps(torch.optim.Muon(theirs, **settings, ns_steps=4, adjust_lr_fn=kind), theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_keeps_directions_and_makes_singular_values_equal(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = newton_schulz(matrix, 5)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ result @ vh.mT
    torch.testing.assert_close(inner, inner.diagonal().diag(), atol=1e-9, rtol=0)
    large = s / s.norm() > 0.05  # small ones need more iterations
    assert (inner.diagonal()[large] > 0.5).all()
    assert (inner.diagonal() < 1.5).all()


def test_each_matrix_of_a_batch_is_a_matrix_of_its_own():
    torch.manual_seed(0)
    batch = torch.randn(5, 8, 6, dtype=torch.float64)
    together = newton_schulz(batch, 5)
    for matrix, result in zip(batch, together, strict=True):
        torch.testing.assert_close(newton_schulz(matrix, 5), result)
    (whole,) = parameters_of([(5, 8, 6)])
    parts = [torch.nn.Parameter(matrix.detach().clone()) for matrix in whole]
    settings = {"lr": 0.1, "weight_decay": 0.1, "dtype": torch.float32}
    steps(Muon([whole], **settings), [whole])
    torch.manual_seed(1)
    optimizer = Muon(parts, **settings)
    for _ in range(4):
        for part, gradient in zip(parts, torch.randn(5, 8, 6), strict=True):
            part.grad = gradient
        optimizer.step()
    torch.testing.assert_close(torch.stack(list(parts)), whole.data)


SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2, 3], [], []]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "muon_lr": 2e-2, "muon_dtype": "float32"}
# A gradient's last bits grow in the iteration, by up to its slope at 0 (about 500 after 5 steps).
BOUND = 5e-3
DENSE = {
    2: {"tp2": {"tp": 2}, "replicate2": {"dp_replicate": 2}},
    4: {
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp2 tp2": {"dp_shard": 2, "tp": 2},
        "fsdp2 pp2 in a V": {"dp_shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"},
    },
}
EXPERTS = {
    4: {
        "fsdp4 ep2": {"dp_shard": 4, "ep": 2},
        "fsdp2 ep2 tp2": {"dp_shard": 2, "tp": 2, "ep": 2},
    },
}


@pytest.mark.parametrize(("kind", "of_ranks"), [("qwen3", DENSE), ("qwen3_mixed", EXPERTS)])
def test_sharded_steps_are_those_of_one_process(kind, of_ranks, make_model, run_ranks, tmp_path):
    """They also resume from the checkpoint of one process."""
    _, folder = make_model(kind, num_hidden_layers=4, intermediate_size=78)
    common = {"model": folder, "seq_len": 12, "sequences": SEQUENCES, "rows": ROWS}
    common |= {"optimizer": SETTINGS, "reference": str(tmp_path)}
    (reference,) = run_ranks("muon_ranks", 1, layouts={}, **common)
    assert reference["kinds"] == ["AdamW", "Muon"]
    assert "state.layers.0.attention.wq.weight.momentum_buffer" in reference["state"]
    assert "state.tok_embeddings.weight.exp_avg_sq" in reference["state"]
    for num_ranks, layouts in of_ranks.items():
        results = run_ranks("muon_ranks", num_ranks, layouts=layouts, **common)
        for name in layouts:
            held = {key for result in results for key in result[name]["trained"]}
            assert len(held) >= 4 * 9 + 3, "the ranks together hold the whole model"
            for way in ("trained", "resumed"):
                found = {k: e for result in results for k, e in result[name][way].items()}
                assert not {k: e for k, e in found.items() if not e < BOUND}, (name, way)
