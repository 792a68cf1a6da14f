# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The store of deferred weight gradients without a pipeline, and experts, which use it as well."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import torchtitan.grpo.models.blocks.experts as blocks
from torchtitan.grpo.models.blocks.experts import GroupedExperts, Groups, spread
from torchtitan.grpo.models.blocks.parts import RoutedExperts
from torchtitan.grpo.models.weight_grads import (
    DeferredExperts,
    WeightGradients,
    defer_experts,
    defer_linears,
)


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
def test_the_weights_of_experts_wait_in_the_store_and_have_autograds_gradients(
    grouped, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "has_grouped_products", lambda _: grouped)
    row = RoutedExperts(dim=32, expert_hidden=48, num_experts=4, top_k=2)
    experts = GroupedExperts(row)
    with torch.no_grad():
        experts.init_weights(0.1)
    x, chosen = torch.randn(40, 32), torch.randint(3, (40, 2))
    chosen[chosen == 1] = 3  # an expert without tokens, and groups that need padding
    output_grad, found = torch.randn(40, 2, 32), {}
    for name in ("plain", "deferred"):
        store = WeightGradients()
        if name == "deferred":
            defer_experts(experts, store)
            assert isinstance(experts, DeferredExperts)
        experts.zero_grad()
        input = x.clone().requires_grad_()
        with store.catching((0, 0), add):
            output = experts(input, chosen)
            output.backward(output_grad)
        if name == "deferred":
            assert all(p.grad is None for p in experts.parameters()) and store.waits((0, 0))
            store.run((0, 0))
        found[name] = [output, input.grad, *(p.grad for p in experts.parameters())]
    for plain, deferred in zip(found["plain"], found["deferred"], strict=True):
        assert plain is not None and torch.equal(plain, deferred)
    one = experts.w2[3] @ (F.silu(experts.w1[3] @ x[5]) * (experts.w3[3] @ x[5]))
    index = int((chosen == 3)[5].nonzero()[0]) if (chosen[5] == 3).any() else None
    if index is not None:
        torch.testing.assert_close(output[5, index], one, atol=0.02, rtol=0.02)


def test_numbers_are_grouped_in_their_order_and_padded():
    groups = Groups.of(torch.tensor([2, 0, 2, 2, 0]), num_groups=4, multiple=4)
    assert groups.sizes.tolist() == [4, 4, 4, 4], "no group is empty"
    assert groups.place.tolist() == [8, 0, 9, 10, 1]
    assert groups.source[groups.place].tolist() == [0, 1, 2, 3, 4]
    assert Groups.of(torch.tensor([1, 0, 1]), num_groups=3).source.tolist() == [1, 0, 2]


def test_nothing_is_read_of_what_lies_in_padding():
    groups = Groups.of(torch.tensor([1, 0, 1]), num_groups=2, multiple=4)
    x = torch.randn(3, 2, requires_grad=True)
    placed = spread(x, groups)
    gradient = torch.full_like(placed, torch.nan)
    gradient[groups.place] = 1.0
    placed.backward(gradient)
    assert torch.equal(x.grad, torch.ones(3, 2))
    assert spread(x[:0], Groups.of(groups.place[:0], 2, 4)).shape == (8, 2), "no tokens arrived"
