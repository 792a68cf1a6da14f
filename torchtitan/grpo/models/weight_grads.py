# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weight gradients that are computed later than the gradients of their layers' inputs.

Zero-bubble schedules run a stage's backward pass in two actions, I and W. Here, I is a whole
backward pass in which linear layers and experts store their input and the gradient of their
output, so that activation checkpoints recompute each block once. W multiplies what was stored.
The store occupies at most ``max_pending_bytes`` after each ``put``: the oldest products are
computed early. Products of one parameter are added to its gradient in the order of ``put``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.blocks.experts import GroupedExperts, multiply_groups
from torchtitan.grpo.models.shards import divided_like, local_tensor

Key = tuple[int, int]
"""Stage and microbatch of a backward pass."""

AddGradient = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds the second argument to the gradient of a parameter, the first argument."""


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def multiply_linear(output_grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Computes the gradient [out, in] of a linear layer's weight from [..., out] and [..., in]."""
    # The operands and their order are autograd's, for the same bits.
    return output_grad.flatten(0, -2).t().mm(input.flatten(0, -2))


@dataclass(frozen=True)
class _Product:
    weight: torch.Tensor
    input: torch.Tensor
    output_grad: torch.Tensor
    add: AddGradient
    multiply: Multiply

    def run(self) -> None:
        self.add(self.weight, self.multiply(self.output_grad, self.input))


class WeightGradients:
    """The pending products of all stages of a rank; ``max_pending_bytes`` None sets no bound."""

    def __init__(self, max_pending_bytes: int | None = None) -> None:
        self.max_pending_bytes = max_pending_bytes
        self.pending_bytes = self.peak_bytes = 0
        self._catching: tuple[Key, AddGradient] | None = None
        self._pending: dict[Key, deque[_Product]] = {}
        self._holders: dict[int, int] = {}

    @property
    def is_catching(self) -> bool:
        return self._catching is not None

    @contextmanager
    def catching(self, key: Key, add: AddGradient) -> Iterator[None]:
        """Context in which passes defer weight gradients. A pass's recomputation must also run inside it."""
        assert self._catching is None, "a pass of a stage began inside the pass of another stage"
        self._catching = key, add
        try:
            yield
        finally:
            self._catching = None

    def put(
        self,
        weight: torch.Tensor,
        input: torch.Tensor,
        output_grad: torch.Tensor,
        multiply: Multiply = multiply_linear,
    ) -> None:
        """Stores the factors of a weight's gradient; called in the backward pass, on any thread."""
        assert self._catching is not None, "a deferred backward pass ran outside its context"
        key, add = self._catching
        product = _Product(weight, input.detach(), output_grad.detach(), add, multiply)
        self._pending.setdefault(key, deque()).append(product)
        self._count(product, 1)
        bound = self.max_pending_bytes
        while bound is not None and self.pending_bytes > bound:
            self._run_first(next(iter(self._pending)))
        self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def run(self, key: Key) -> None:
        while key in self._pending:
            self._run_first(key)

    def waits(self, key: Key) -> bool:
        return key in self._pending

    def check_empty(self) -> None:
        assert not self._pending, f"Weight gradients of {list(self._pending)} were not computed."
        assert self.pending_bytes == 0, f"{self.pending_bytes} bytes are still counted as pending."

    @torch.no_grad()
    def _run_first(self, key: Key) -> None:
        products = self._pending[key]
        product = products.popleft()
        if not products:
            del self._pending[key]
        product.run()
        self._count(product, -1)

    def _count(self, product: _Product, change: int) -> None:
        """Counts memory that several products share, such as the input of q, k and v, once."""
        for tensor in (product.input, product.output_grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            before = self._holders.get(storage._cdata, 0)
            after = before + change
            if before == 0 or after == 0:
                self.pending_bytes += change * storage.nbytes()
            if after:
                self._holders[storage._cdata] = after
            else:
                del self._holders[storage._cdata]


class DeferredLinear(nn.Linear):
    """A copy of a linear layer, sharing its parameters, that can defer the gradient of its weight."""

    def __init__(self, linear: nn.Linear, store: WeightGradients) -> None:
        super().__init__(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self.store = store

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_trained = torch.is_grad_enabled() and input.requires_grad and self.weight.requires_grad
        if not (is_trained and self.store.is_catching):
            return super().forward(input)
        return deferred(
            lambda tapped: F.linear(tapped, self.weight.detach(), self.bias),
            input,
            partial(self.store.put, self.weight),
        )


def deferred(
    product: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,
    put: Callable[[torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Returns ``product(input)``. Its backward pass calls ``put`` with the input and the output's gradient."""
    caught: list[torch.Tensor] = []
    # The product is not inside this function of ours, since a recomputed checkpoint could then not
    # stop before the last product of its block.
    tapped: Any = _Tap.apply(input, caught, put)
    output = product(tapped)
    output.register_hook(caught.append)  # pyright: ignore[reportArgumentType]
    return output


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, caught, put):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(input)
        # A parameter saved here comes back from a checkpoint as a detached stand-in, whose gradient
        # nobody reads. The parameter is therefore in `put`.
        ctx.caught, ctx.put = caught, put
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (input,) = ctx.saved_tensors
        ctx.put(input, ctx.caught.pop())
        return grad, None, None


def defer_linears(model: nn.Module, store: WeightGradients) -> None:
    """Replaces every ``nn.Linear`` by a :class:`DeferredLinear`, but not subclasses, which may differ."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, DeferredLinear(child, store))


class DeferredExperts(GroupedExperts):
    store: WeightGradients

    def product(self, x: torch.Tensor, weight: nn.Parameter, counts: Any) -> torch.Tensor:
        is_trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        if not (is_trained and self.store.is_catching):
            return super().product(x, weight, counts)
        experts = local_tensor(weight)

        def multiply(output_grad: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
            gradient = _gradients_of_groups(output_grad, tapped, counts).to(weight.dtype)
            return divided_like(weight, gradient)

        return deferred(
            lambda tapped: multiply_groups(tapped, experts, counts),
            x.bfloat16() if isinstance(counts, torch.Tensor) else x,
            partial(self.store.put, weight, multiply=multiply),
        )


def _gradients_of_groups(
    output_grad: torch.Tensor, input: torch.Tensor, counts: Any
) -> torch.Tensor:
    """Computes the weight gradients of :func:`multiply_groups`, [experts, out, in], just as autograd does."""
    if isinstance(counts, torch.Tensor):
        return torch._grouped_mm(output_grad.transpose(-2, -1), input, offs=counts)
    parts = zip(output_grad.split(counts), input.split(counts), strict=True)
    return torch.stack([rows.t().mm(grad).t() for grad, rows in parts])


def defer_experts(model: nn.Module, store: WeightGradients) -> None:
    for module in model.modules():
        if type(module) is GroupedExperts:
            module.__class__ = DeferredExperts
            module.store = store  # pyright: ignore[reportArgumentType]
