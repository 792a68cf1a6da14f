# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A compiled backward pass leaves the products of weight gradients to the store."""

import copy
import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.grpo.models.split_compile import SplitBackend, _Tap
from torchtitan.grpo.models.weight_grads import WeightGradients

KEY = (0, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight).relu(), self.weight)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def add(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


@pytest.fixture
def compiled():
    """Returns two copies of a module, compiled by inductor and by the backend, and the backend."""

    def compile_both(module: nn.Module) -> tuple[nn.Module, nn.Module, SplitBackend]:
        backend = SplitBackend(WeightGradients())
        plain, split = module, copy.deepcopy(module)
        plain.compile(backend="inductor", fullgraph=True)
        split.compile(backend=backend, fullgraph=True)
        return plain, split, backend

    yield compile_both
    torch.compiler.reset()


def backward(module: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def assert_equal_gradients(plain: nn.Module, split: nn.Module) -> None:
    for (name, expected), (_, found) in zip(
        plain.named_parameters(), split.named_parameters(), strict=True
    ):
        assert found.grad is not None and expected.grad is not None, name
        assert torch.equal(found.grad, expected.grad), name


def test_weight_gradients_wait_in_the_store_and_are_equal_to_the_bit(compiled):
    torch.manual_seed(0)
    plain, split, backend = compiled(Block())
    store = backend.store
    for seed in range(3):  # gradients add up, and other contents compile nothing
        with store.catching(KEY, add):
            x_grad = backward(split, seed)
        assert torch.equal(x_grad, backward(plain, seed))
        assert store.waits(KEY)
        if seed == 0:
            assert split.up.weight.grad is None and split.down.weight.grad is None
            assert split.up.bias.grad is not None and split.norm.weight.grad is not None
        store.run(KEY)
        assert_equal_gradients(plain, split)
    store.check_empty()
    (graph,) = backend.graphs
    assert (graph.linears, graph.deferred, graph.products) == (2, 2, 2)


def test_the_gradient_of_an_input_is_never_deferred_though_it_is_a_product(compiled):
    plain, split, backend = compiled(Bare())
    with backend.store.catching(KEY, add):
        x_grad = backward(split, 0)
    assert torch.equal(x_grad, backward(plain, 0))
    backend.store.run(KEY)
    assert_equal_gradients(plain, split)
    assert backend.graphs[0].deferred == 1


def test_a_gradient_whose_factors_were_lost_is_not_taken_for_zero(compiled, monkeypatch):
    _, split, backend = compiled(Bare())
    tap_backward = _Tap.backward
    lose = staticmethod(lambda ctx, grad: tap_backward(ctx, grad.clone()))
    monkeypatch.setattr(_Tap, "backward", lose)
    with backend.store.catching(KEY, add):
        backward(split, 0)
    assert split.up.weight.grad.isnan().all()


def test_a_gradient_that_is_no_product_stays_and_is_reported(compiled, caplog):
    torch.manual_seed(0)
    plain, split, backend = compiled(Shared())
    with caplog.at_level(logging.WARNING), backend.store.catching(KEY, add):
        backward(split, 0)
    backward(plain, 0)
    assert_equal_gradients(plain, split)
    backend.store.check_empty()
    assert backend.graphs[0].deferred == 0
    assert "defers 0 of 2 weight gradients" in caplog.text
