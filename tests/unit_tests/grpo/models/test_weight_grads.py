# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The store of deferred weight gradients without a pipeline, and experts, which use it as well."""

import copy

import pytest
import torch
import torch.nn as nn

from torchtitan.grpo.models.moe import histogram
from torchtitan.grpo.models.weight_grads import (
    DeferredExperts,
    WeightGradients,
    defer_experts,
    defer_linears,
)
from torchtitan.grpo.upstream.models import GroupedExperts, run_experts_grouped_mm


def add(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 4, bias=False))


def test_weights_wait_and_all_other_gradients_do_not(layers):
    plain, store = copy.deepcopy(layers), WeightGradients()
    defer_linears(layers, store)
    x = torch.randn(2, 5, 8)
    plain(x).square().sum().backward()
    with store.catching((0, 3), add):
        layers(x).square().sum().backward()
    waiting = {name for name, parameter in layers.named_parameters() if parameter.grad is None}
    assert waiting == {"1.weight", "3.weight"}
    with pytest.raises(AssertionError, match=r"\(0, 3\)"):
        store.check_empty()
    store.run((0, 3))
    store.check_empty()
    for mine, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


@pytest.mark.parametrize("grouped", [False, True])
def test_weights_wait_in_the_store_and_have_autograds_gradients(grouped):
    torch.manual_seed(0)
    experts = GroupedExperts(32, 48, 4, use_grouped_mm=grouped)
    with torch.no_grad():
        experts.init_weights(0.1)
    counts = torch.tensor([16, 0, 40, 8])
    x, output_grad = torch.randn(2, 64, 32)
    found = {}
    for name in ("plain", "deferred"):
        store = WeightGradients()
        if name == "deferred":
            defer_experts(experts, store)
            assert isinstance(experts, DeferredExperts)
        experts.zero_grad()
        input = x.clone().requires_grad_()

        with store.catching((0, 0), add):
            if grouped:  # Upstream's padding of groups is a kernel of the GPU; these need none.
                run = experts._run_grouped if name == "deferred" else run_experts_grouped_mm
                output = run(experts.w1, experts.w2, experts.w3, input, counts)
            else:
                output = experts(input, counts)
            output.backward(output_grad)
        if name == "deferred":
            assert all(p.grad is None for p in experts.parameters()) and store.waits((0, 0))
            store.run((0, 0))
        found[name] = [input.grad, *(p.grad for p in experts.parameters())]
    for plain, deferred in zip(found["plain"], found["deferred"], strict=True):
        assert plain is not None and torch.equal(plain, deferred)


def test_experts_are_counted_exactly_on_a_cpu_and_other_histograms_stay():
    for num_experts in (8, 60, 128):
        chosen = torch.randint(num_experts, (1000,))
        counts = histogram(chosen, bins=num_experts, min=0, max=num_experts)
        assert counts.dtype == torch.int64
        assert torch.equal(counts, torch.bincount(chosen, minlength=num_experts))
    values = torch.rand(100)
    assert torch.equal(histogram(values, bins=5, min=0, max=1), torch.histc(values, 5, 0, 1))
