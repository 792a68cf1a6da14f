# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Grouped experts whose weight gradients can be computed later than their input's gradient.

As in `deferred_linear.py`, the backward pass hands the factors of each of the three weights'
gradients to a store. Products, and the padding of groups, are those of upstream's experts.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.deferred_linear import deferred
from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.upstream.models import GroupedExperts, indices_padding_wrapper


class DeferredExperts(GroupedExperts):
    """Upstream's experts, which may defer the gradients of their weights.

    Instances are made by :func:`defer_experts`. While the store does not catch gradients, they are
    upstream's.
    """

    store: WeightGradients

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        is_trained = torch.is_grad_enabled() and x.requires_grad and self.w1.requires_grad
        if not (is_trained and self.store.is_catching):
            return super().forward(x, num_tokens_per_expert)
        if not self.use_grouped_mm:
            return self._run_in_a_loop(x, num_tokens_per_expert.tolist())
        # Expert parallelism pads the groups itself.
        names = self.w1.device_mesh.mesh_dim_names if isinstance(self.w1, DTensor) else ()
        pads = "ep" not in (names or ())
        run = indices_padding_wrapper(self._run_grouped) if pads else self._run_grouped
        return run(local(self.w1), local(self.w2), local(self.w3), x, num_tokens_per_expert)

    def _run_in_a_loop(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Computes one expert after the other; ``counts`` are their tokens."""
        num_tokens = sum(counts)

        def product(input: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
            experts = local(weight.detach()).transpose(-2, -1)

            def multiply_all(tapped: torch.Tensor) -> torch.Tensor:
                parts = zip(tapped.split(counts), experts, strict=True)
                return torch.cat([tokens.matmul(expert) for tokens, expert in parts])

            def gradient(output_grad: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
                parts = zip(output_grad.split(counts), tapped.split(counts), strict=True)
                # The operands and their order are autograd's, for the same bits.
                return torch.stack([tokens.t().mm(grad).t() for grad, tokens in parts])

            return self._deferred(multiply_all, input, weight, gradient)

        tokens = x[:num_tokens]
        pairs = zip(*(product(tokens, w).split(counts) for w in (self.w1, self.w3)), strict=True)
        # One expert at a time, as upstream does it: a CPU rounds the end of a tensor differently.
        out = product(torch.cat([F.silu(gate) * up for gate, up in pairs]), self.w2)
        # Expert parallelism pads the tokens, which a loop does not need.
        return torch.vstack((out, out.new_zeros(len(x) - num_tokens, out.shape[-1])))

    def _run_grouped(
        self,
        _w1: torch.Tensor,
        _w2: torch.Tensor,
        _w3: torch.Tensor,
        x: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
    ) -> torch.Tensor:
        """Computes all experts by grouped products. Upstream's wrapper passes weights, too."""
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)

        def product(input: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
            experts = local(weight.detach()).bfloat16().transpose(-2, -1)

            def gradient(output_grad: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
                return torch._grouped_mm(output_grad.transpose(-2, -1), tapped, offs=ends)

            return self._deferred(
                lambda tapped: torch._grouped_mm(tapped, experts, offs=ends),
                input.bfloat16(),
                weight,
                gradient,
            )

        hidden = F.silu(product(x, self.w1)) * product(x, self.w3)
        return product(hidden, self.w2).type_as(x)

    def _deferred(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        input: torch.Tensor,
        weight: nn.Parameter,
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        def multiply(output_grad: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
            found = gradient(output_grad, tapped).to(weight.dtype)
            if not isinstance(weight, DTensor):
                return found
            return DTensor.from_local(
                found, weight.device_mesh, weight.placements, run_check=False,
                shape=weight.shape, stride=weight.stride(),
            )  # fmt: skip

        return deferred(product, input, partial(self.store.put, weight, multiply=multiply))


def local(weight: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def defer_experts(model: nn.Module, store: WeightGradients) -> None:
    """Makes every group of experts of a model defer its weights' gradients, in place."""
    for module in model.modules():
        if type(module) is GroupedExperts:
            module.__class__ = DeferredExperts
            module.store = store  # pyright: ignore[reportArgumentType]
