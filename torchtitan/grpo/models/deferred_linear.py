# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Linear layers whose weight gradient can be computed later than their input's gradient.

The backward pass of such a layer computes the gradient of the input at once and hands the input
and the gradient of the output to a store (`models/weight_grads.py`), which multiplies them when
the pipeline's schedule asks for it. Backward remains one ordinary pass over the graph, so that
activation checkpoints recompute each block once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.grpo.models.weight_grads import WeightGradients


class DeferredLinear(nn.Linear):
    """An ``nn.Linear`` that shares the parameters of another and may defer its weight's gradient.

    While the store does not catch gradients, this is an ordinary linear layer. The gradient of a
    bias is a cheap sum and is never deferred.

    Args:
        linear: The layer whose parameters are shared.
        store: Store of the pipeline's deferred gradients.
    """

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
    """Returns a layer's output; its backward pass hands over the factors of a weight's gradient.

    Args:
        product: Computes the output from the input, without a gradient of the weight.
        input: The layer's input.
        put: Called in the backward pass with the input and the gradient of the output.
    """
    caught: list[torch.Tensor] = []
    # The product itself is torch's own. Inside a function of ours, a checkpoint that is
    # recomputed could not stop before the last product of its block.
    tapped: Any = _Tap.apply(input, caught, put)
    output = product(tapped)
    output.register_hook(caught.append)  # pyright: ignore[reportArgumentType]
    return output


class _Tap(torch.autograd.Function):
    """Passes a layer's input on; its backward hands the factors of the weight's gradient over."""

    @staticmethod
    def forward(ctx, input, caught, put):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(input)
        # A parameter that a checkpoint saved comes back as a detached stand-in, whose gradient
        # nobody reads. The parameter is therefore not among the saved tensors, but in `put`.
        ctx.caught, ctx.put = caught, put
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (input,) = ctx.saved_tensors
        ctx.put(input, ctx.caught.pop())
        return grad, None, None


def defer_linears(model: nn.Module, store: WeightGradients) -> None:
    """Replaces every layer of a model that is exactly an ``nn.Linear``, in place.

    Subclasses, such as the output layer, compute in another way and stay as they are.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, DeferredLinear(child, store))
