# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Muon for sharded matrices, with the same numbers as in one process.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest
orthogonal one, approximated by a Newton-Schulz iteration on the whole matrix. Each rank gathers one
momentum after the other, computes the same iteration, and keeps its shard of the result.

`torch.optim.Muon` is the same in one process, bit for bit. With a ``DTensor`` it communicates in
each iteration (15 all-gathers or 11 all-reduces for a matrix, in torch 2.13), adds partial products
in bfloat16, so that numbers depend on the layout, and refuses the three-dimensional weights of
experts.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Replicate

AdjustRate = Literal["original", "match_rms_adamw"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic polynomial of the Muon post, with the largest possible slope at 0."""

EPS = 1e-7


def newton_schulz(matrices: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Returns about ``U V^T`` of each [..., rows, columns] matrix ``U S V^T``, in its dtype.

    Singular values of the result lie between about 0.5 and 1.5. There may be one batch dimension.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def adjusted_rate(rate: float, kind: AdjustRate, shape: torch.Size) -> float:
    """Returns the learning rate ``rate``, adjusted for a matrix of shape [..., rows, columns].

    ``match_rms_adamw`` makes updates as large as AdamW's (https://arxiv.org/abs/2502.16982).
    """
    rows, columns = shape[-2:]
    if kind == "original":
        return rate * max(1.0, rows / columns) ** 0.5
    return rate * 0.2 * max(rows, columns) ** 0.5


class Muon(torch.optim.Optimizer):
    """Muon for plain or sharded matrices, and for three-dimensional batches of matrices.

    All ranks of a mesh must step the same matrices. Only updates are scaled by the
    :func:`adjusted_rate`; weight decay is scaled by ``lr`` itself.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustRate = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self._dtype = dtype
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    "Muon trains matrices and batches of them, got a parameter of shape "
                    f"{tuple(parameter.shape)}. Give it to AdamW."
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes one step. Collective over the meshes of the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = orthogonalized(update.to(self._dtype), group["ns_steps"]).to(parameter.dtype)
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        adjusted = adjusted_rate(rate, group["adjust_lr_fn"], parameter.shape)
        parameter.add_(update, alpha=-adjusted)


def orthogonalized(update: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Applies :func:`newton_schulz` to whole matrices; the result is sharded like ``update``.

    ``update`` is [rows, columns] or [experts, rows, columns]. Ranks with different experts compute
    different matrices; all others compute the same ones.
    """
    if not isinstance(update, DTensor):
        return newton_schulz(update, num_steps)
    mesh, placements = update.device_mesh, update.placements
    whole = [p if _splits_batch(p, update.ndim) else Replicate() for p in placements]
    gathered = update.redistribute(placements=whole)
    result = newton_schulz(gathered.to_local(), num_steps)
    back = DTensor.from_local(
        result.contiguous(),
        mesh,
        whole,
        run_check=False,
        shape=update.shape,
        stride=update.stride(),
    )
    return back.redistribute(placements=placements)  # each rank cuts out its part


def _splits_batch(placement: Any, ndim: int) -> bool:
    # Includes the strided shards of FSDP over experts, which are no subclass in every torch.
    return ndim == 3 and getattr(placement, "dim", None) == 0 and not placement.is_partial()
