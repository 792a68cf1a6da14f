# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Experts defer the gradients of their weights, and the gradients stay equal to the bit."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchtitan.grpo.models.weight_grads import DeferredExperts, WeightGradients, defer_experts
from torchtitan.grpo.upstream.models import GroupedExperts

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
PLAIN = {"pp": 2, "schedule": "Interleaved1F1B"}
ZBV = {"pp": 2, "schedule": "ZBVZeroBubble"}
DIM, HIDDEN, EXPERTS, TOKENS = 32, 48, 4, 64


@pytest.fixture
def compared(tmp_path, run_ranks):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=48, head_dim=16, num_hidden_layers=4,  # pyright: ignore
        num_attention_heads=6, num_key_value_heads=2, moe_intermediate_size=20, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64,
        initializer_range=0.3, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)

    def compare(num_ranks, *cases):
        (result, *_) = run_ranks(
            "deferred_gradients", num_ranks, model=str(tmp_path), seq_len=12, sequences=SEQUENCES,
            rows=[[0], [1], [2], [3]], cases=cases,
        )  # fmt: skip
        return result["results"]

    return compare


def test_a_pipeline_with_experts_has_equal_gradients(compared):
    modes = ({"ac": "full"}, {"precision": "bfloat16"})
    for mode in modes:
        for found in compared(2, PLAIN | mode, ZBV | mode):
            assert found["different"] == []


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2, "precision": "bfloat16"}]
)
def test_sharded_experts_have_equal_gradients(compared, layout):
    for found in compared(4, PLAIN | layout | {"ac": "full"}, ZBV | layout | {"ac": "full"}):
        assert found["different"] == []


def test_experts_under_tensor_parallelism_have_the_same_gradients(compared):
    """A CPU's products of ten columns depend on where in memory they begin."""
    _, found = compared(4, *(case | {"tp": 2, "ac": "full"} for case in (PLAIN, ZBV)))
    assert found["distance"] < 1e-5


@pytest.mark.parametrize("grouped", [False, True])
def test_weights_wait_in_the_store_and_have_autograds_gradients(grouped):
    torch.manual_seed(0)
    experts = GroupedExperts(DIM, HIDDEN, EXPERTS, use_grouped_mm=grouped)
    with torch.no_grad():
        experts.init_weights(0.1)
    counts = torch.tensor([16, 0, 40, 8])
    x, output_grad = torch.randn(2, TOKENS, DIM)
    found = {}
    for name in ("plain", "deferred"):
        store = WeightGradients()
        if name == "deferred":
            defer_experts(experts, store)
            assert isinstance(experts, DeferredExperts)
        experts.zero_grad()
        input = x.clone().requires_grad_()

        def add(weight, gradient):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        with store.catching((0, 0), add):
            # Upstream's padding of groups is a kernel of the GPU; these groups need none.
            run = experts._run_grouped if grouped and name == "deferred" else experts.forward
            arguments = (input, counts)
            if grouped:
                weights = (experts.w1, experts.w2, experts.w3)
                run = run if name == "deferred" else upstream_grouped
                arguments = (*weights, input, counts)
            run(*arguments).backward(output_grad)
        if name == "deferred":
            assert all(p.grad is None for p in experts.parameters()) and store.waits((0, 0))
            store.run((0, 0))
        found[name] = [input.grad, *(p.grad for p in experts.parameters())]
    for plain, deferred in zip(found["plain"], found["deferred"], strict=True):
        assert plain is not None and torch.equal(plain, deferred)


def upstream_grouped(*arguments):
    from torchtitan.grpo.upstream.models import run_experts_grouped_mm as _run_experts_grouped_mm

    return _run_experts_grouped_mm(*arguments)
