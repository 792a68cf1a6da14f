# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A pipeline stage that computes the weight gradients of its linear layers in the W action.

Torch's own split of the backward pass traverses the graph once for the inputs and once more for
each group of parameters. It recomputes checkpointed blocks every time. Under FSDP2, before release
2.15, it accumulates the gradients of microbatches in the dtype of the parameters instead of the dtype
of the reduction.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage

from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.pipeline.lean_stage import LeanStage

# FSDP2 adds microbatches up in the dtype of the reduction, but only in the hooks of a backward pass,
# which has ended before W.
SUMS_IN_GRAD = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether FSDP2's sum is the parameter's ``grad``, as from torch 2.15 on, and not FSDP2's own."""


class DeferredStage(LeanStage):
    """A stage that defers the weight gradients of microbatches.

    A schedule's first step also runs passes that infer shapes. These passes run outside the methods
    that activate the store, so that they put nothing into it.

    Args:
        stage: The stage that this stage replaces.
        store: Store of this rank's deferred gradients, which the linear layers of the stage use.
    """

    def __init__(self, stage: PipelineStage, store: WeightGradients) -> None:
        super().__init__(
            stage.submod,
            stage.stage_index,
            stage.num_stages,
            stage.device,
            group=stage.group,
            dw_builder=lambda: self._weight_gradients_of(self._microbatch),
        )
        self.store = store
        self._microbatch = -1
        self._fsdp_params: dict[torch.Tensor, Any] | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = bwd_chunk_id
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.store.catching((self.stage_index, self._microbatch), self._add_gradient):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.store.catching((self.stage_index, self._microbatch), self._add_gradient):
            return super().backward_maybe_with_nosync(*args, **kwargs)

    def recompute(self, microbatch: int) -> Any:
        with self.store.catching((self.stage_index, microbatch), self._add_gradient):
            return super().recompute(microbatch)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._check_that_none_waits()
        super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Starts FSDP's reduction. Torch calls it from release 2.15 on."""
        self._check_that_none_waits()
        super().start_gradient_reduction()  # pyright: ignore[reportAttributeAccessIssue]

    def _check_that_none_waits(self) -> None:
        for microbatch in range(self.chunks or 0):
            assert not self.store.waits((self.stage_index, microbatch)), (
                f"the gradients of stage {self.stage_index} are reduced before the gradients of "
                f"microbatch {microbatch} are complete"
            )

    def _weight_gradients_of(self, microbatch: int) -> Any:
        return lambda: self.store.run((self.stage_index, microbatch))

    def _add_gradient(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a gradient in the same way as autograd and then FSDP2."""
        if self._fsdp_params is None:
            self._fsdp_params = fsdp_params_of(self.submod)
        param = self._fsdp_params.get(weight)
        if param is not None and weight.grad is None and SUMS_IN_GRAD:
            gradient = gradient.to(param.unsharded_grad_dtype)
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient
        if param is not None and not SUMS_IN_GRAD:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def fsdp_params_of(module: nn.Module) -> dict[torch.Tensor, Any]:
    """Returns FSDP2's own objects for a module's parameters, by the gathered parameters.

    The function must be called after a forward pass, which creates the gathered parameters.
    """
    return {
        param._unsharded_param: param
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    }
