# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The store of deferred weight gradients, without a pipeline."""

import copy

import pytest
import torch
import torch.nn as nn

from torchtitan.grpo.models.weight_grads import DeferredLinear, WeightGradients, defer_linears


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


def test_outside_of_the_context_nothing_waits(layers):
    store = WeightGradients()
    defer_linears(layers, store)
    layers(torch.randn(5, 8)).sum().backward()
    store.check_empty()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_shared_memory_is_counted_once():
    store, x, grad = WeightGradients(), torch.randn(6, 8), torch.randn(6, 4)
    with store.catching((1, 0), add):
        store.put(torch.zeros(4, 8), x, grad)
        store.put(torch.zeros(4, 8), x, grad.clone())
    assert store.pending_bytes == x.nbytes + 2 * grad.nbytes


def test_only_an_exact_linear_layer_is_replaced():
    class OwnProduct(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), OwnProduct(2, 2))
    weight = model[0].weight
    defer_linears(model, WeightGradients())
    assert type(model[0]) is DeferredLinear and model[0].weight is weight
    assert type(model[1]) is OwnProduct
