# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pipeline stages that hold the memory of their exchanges only as long as it is needed.

Before release 2.15, torch's stage allocates a buffer for every microbatch before the first one
arrives, and torch's runtime keeps every sent tensor until the step has ended. From 2.15 on, the
only difference to torch's stage is that a pass may have any number of microbatches.

A deferred stage computes the weight gradients of its layers in the W action. Torch's own split
traverses the graph once for the inputs and once for each group of parameters, and recomputes
checkpointed blocks every time. Under FSDP2 before release 2.15, torch's split also accumulates
gradients in the dtype of the parameters instead of that of the reduction.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import GraphExecGroup

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.pipeline.fill import GapFiller
from torchtitan.grpo.pipeline.mail import begun, wait_for
from torchtitan.grpo.pipeline.offload import OffloadPlan
from torchtitan.grpo.pipeline.pass_marks import PassMarks, timed
from torchtitan.grpo.pipeline.pass_timer import Part, PassTimer


def num_early_blocks(config: JobConfig) -> int:
    """Returns how many blocks of a stage may be recomputed before a gradient arrives; -1 means all.

    Compiled checkpoints cannot be recomputed early. Neither can stages whose parameters are freed
    after the forward pass: FSDP gathers them again only when a gradient arrives.
    """
    is_checkpointed = config.activation_checkpoint.mode in ("full", "selective")
    frees_parameters = config.parallelism.fsdp_reshard_after_forward == "always"
    if config.compile.enable or not is_checkpointed or frees_parameters:
        return 0
    return config.grpo.recompute_early_blocks


class EarlyRecompute:
    """Recomputes the last ``num_blocks`` checkpointed blocks of a stage (-1: all) early.

    The last block takes no additional memory: the backward pass needs its activations first.
    """

    def __init__(self, stage_module: nn.Module, num_blocks: int) -> None:
        blocks = [m for m in stage_module.modules() if isinstance(m, CheckpointWrapper)]
        for block in blocks if num_blocks < 0 else blocks[max(0, len(blocks) - num_blocks) :]:
            block._checkpoint_wrapped_module.register_forward_pre_hook(self._mark)
        self._marks: dict[int, list[Any]] = {}
        self._marking: list[Any] | None = None

    @contextmanager
    def marking(self, microbatch: int) -> Iterator[None]:
        self._marking = self._marks.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._marking = None

    def recompute(self, microbatch: int) -> GraphExecGroup:
        """Recomputes a microbatch's blocks. Its backward pass must run in the returned group."""
        group = GraphExecGroup()
        with group:
            for mark in reversed(self._marks.pop(microbatch)):
                _ = mark.saved_tensors
        return group

    def forget(self) -> None:
        self._marks.clear()

    def _mark(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Marks the block's first input. A recomputation also marks it, but this mark is not used."""
        if not torch.is_grad_enabled():
            return None
        marks = [] if self._marking is None else self._marking
        return (_Mark.apply(inputs[0], marks), *inputs[1:])


class _Mark(torch.autograd.Function):
    """Passes a tensor through and saves an empty tensor for the backward pass."""

    @staticmethod
    def forward(ctx, input, marks):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(torch.empty(0, device=input.device))
        marks.append(ctx)
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


TORCH_ALLOCATES = hasattr(_RecvInfo, "allocate_buffer")
"""True from torch 2.15 on: its stage allocates a buffer only when it receives."""
OUTPUTS = "_forward_chunk_states" if TORCH_ALLOCATES else "fwd_cache"
"""Attribute in which torch's stage keeps the outputs of forward passes."""


class LeanStage(PipelineStage):
    """A stage that allocates a buffer when it receives, and frees a tensor when it has been sent.

    ``offset`` is the number of the model's first stage, so that models run in one pass differ in it.
    """

    surrounding: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        *args: Any,
        offset: int = 0,
        **kwargs: Any,
    ) -> None:
        self.offset = offset
        super().__init__(submodule, stage_index + offset, num_stages + offset, *args, **kwargs)
        self.surrounding = nullcontext
        self._leaving: list[dist.Work] = []
        self._arriving: dict[int, list[dist.Work]] = {}
        self._arriving_inputs: dict[int, list[dist.Work]] = {}
        self.timer: PassTimer | None = None
        self.marks: PassMarks | None = None
        self.early: EarlyRecompute | None = None
        self.offload: OffloadPlan | None = None
        self.filler: GapFiller | None = None

    @property
    def is_first(self) -> bool:
        return self.stage_index == self.offset

    @classmethod
    def like(cls, stage: PipelineStage, offset: int = 0) -> "LeanStage":
        """Returns a new stage with the same module, because two schedules cannot share a stage."""
        group, before = stage.group, stage.offset if isinstance(stage, LeanStage) else 0
        index, count = stage.stage_index - before, stage.num_stages - before
        return cls(stage.submod, index, count, stage.device, group=group, offset=before + offset)

    def receive_on_demand(self, num_microbatches: int) -> None:
        """Replaces the buffers that torch has allocated for one microbatch by buffers allocated on demand."""
        self.chunks = num_microbatches
        if not isinstance(self.args_recv_info, _OnDemand):
            self.args_recv_info = _OnDemand(self.args_recv_info[0], self.device)
        if self.grad_recv_info and not isinstance(self.grad_recv_info, _OnDemand):
            self.grad_recv_info = _OnDemand(self.grad_recv_info[0], self.device)

    @property
    def knows_shapes(self) -> bool:
        """True after a schedule has run the stage and has inferred what the stage receives."""
        return isinstance(self.args_recv_info, _OnDemand)

    def example_of_exchanges(self) -> torch.Tensor:
        """A tensor like those that the stage, which must have run, exchanges."""
        received = self.grad_recv_info if self.is_first else self.args_recv_info
        assert isinstance(received, _OnDemand), "the stage has not run yet"
        return received.example()

    def receive_like(self, stage: "LeanStage", offset: int) -> None:
        """Makes this stage receive what another one does, but from stages numbered ``offset`` higher."""
        assert isinstance(stage.args_recv_info, _OnDemand), "the stage has not run yet"
        self.args_recv_info = stage.args_recv_info.renumbered(offset)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            # Torch keeps outputs for a backward pass. Without one, they are not needed after sending.
            getattr(self, OUTPUTS).clear()
        self._fill_gap()
        self._wait_for(self._arriving_inputs.pop(fwd_chunk_id, []), fwd_chunk_id)
        marking = self.early.marking(fwd_chunk_id) if self.early is not None else nullcontext()
        offloading = self._offloading(fwd_chunk_id, args, kwargs)
        with self._timed("F", fwd_chunk_id), marking, offloading, self.surrounding():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.args_recv_info.pop(fwd_chunk_id, None)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.offload is not None:
            self.offload.before_backward((self.stage_index, bwd_chunk_id))
        self._fill_gap()
        group = self._await_gradient(bwd_chunk_id)
        part = "B" if kwargs.get("full_backward", True) else "I"
        with self._timed(part, bwd_chunk_id), group:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        if self.offload is not None:
            self.offload.after_backward((self.stage_index, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._fill_gap()
        with self._timed("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Starts to receive inputs. Returns no operations, because the stage itself waits for its inputs."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        self._arriving_inputs[fwd_chunk_id] = self._receive(operations)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Starts to receive the gradients, as :meth:`get_fwd_recv_ops` does the inputs."""
        self._arriving[bwd_chunk_id] = self._receive(super().get_bwd_recv_ops(bwd_chunk_id))
        return []

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.early is not None:
            self.early.forget()

    def recompute(self, microbatch: int) -> AbstractContextManager[Any]:
        """Recomputes a microbatch's blocks. Its backward pass must run in the returned context."""
        assert self.early is not None, "the stage has no blocks that can be recomputed early"
        return self.early.recompute(microbatch)

    def _await_gradient(self, microbatch: int) -> AbstractContextManager[Any]:
        arriving = self._arriving.pop(microbatch, [])
        if self.timer is not None:
            # When passes are timed, waiting and recomputing must not overlap.
            self._wait_for(arriving, microbatch)
        group = nullcontext()
        if self.early is not None and (arriving or self.timer is not None):
            with self._timed("R", microbatch):
                group = self.recompute(microbatch)
        if self.timer is None:
            self._wait_for(arriving, microbatch)
        return group

    def _fill_gap(self) -> None:
        """Runs other work before a pass, if the rank is idle; the exchanges are queued already."""
        if self.filler is not None:
            self.filler.fill()

    def _wait_for(self, arriving: list[dist.Work], microbatch: int) -> None:
        with nullcontext() if self.filler is None else self.filler.waiting():
            wait_for(arriving, "receive", self.stage_index, microbatch)

    def finish_sending(self) -> None:
        wait_for(self._leaving, "send", self.stage_index)
        self._leaving.clear()

    def _offloading(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        if self.offload is None:
            return nullcontext()
        received = [info.buffer for info in self.args_recv_info[microbatch]]
        inputs = (*received, *tree_leaves((args, kwargs)))
        return self.offload.forward((self.stage_index, microbatch), self.submod, inputs)

    def _timed(self, kind: Part, microbatch: int) -> AbstractContextManager[None]:
        return timed(self.stage_index, kind, microbatch, self.timer, self.marks)

    def _send(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Sends immediately and returns no operations: the runtime would keep their tensors."""
        self._leaving = [work for work in self._leaving if not work.is_completed()]
        for op in operations:
            sent = dist.isend(op.tensor, group=op.group, group_dst=op.group_peer)
            self._leaving.append(begun(sent))
        return []

    def _receive(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        return [
            begun(dist.irecv(op.tensor, group=op.group, group_src=op.group_peer))
            for op in operations
        ]


class _OnDemand(dict[int, tuple[_RecvInfo, ...]]):
    """Received tensors by microbatch. Buffers are allocated at the first access."""

    def __init__(
        self, example: tuple[_RecvInfo, ...], device: torch.device, offset: int = 0
    ) -> None:
        super().__init__()
        self._example, self._device, self._offset = example, device, offset
        for info in example:
            info.buffer = None

    def renumbered(self, offset: int) -> "_OnDemand":
        return _OnDemand(self._example, self._device, offset)

    def example(self) -> torch.Tensor:
        empty = (self._empty(info) for info in self._example)
        return torch.zeros_like(next(tensor for tensor in empty if tensor is not None))

    def __missing__(self, microbatch: int) -> tuple[_RecvInfo, ...]:
        # Every access to a microbatch that is being received must return the same buffers.
        self[microbatch] = tuple(self._of_a_microbatch(info) for info in self._example)
        return self[microbatch]

    def _of_a_microbatch(self, example: _RecvInfo) -> _RecvInfo:
        info = copy.copy(example)
        if info.source is not None:
            info.source += self._offset
        if not TORCH_ALLOCATES:
            info.buffer = self._empty(info)
        return info

    def _empty(self, info: _RecvInfo) -> torch.Tensor | None:
        """Returns a new buffer, or None for the model's own input and where no gradient is received."""
        meta = info.tensor_meta
        if info.is_root_arg or meta is None:
            return None
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)


# FSDP2 adds microbatches up in the dtype of the reduction, but only in the hooks of a backward pass,
# which has ended before W.
SUMS_IN_GRAD = hasattr(FSDPParam, "unsharded_grad_dtype")
"""True from torch 2.15 on: FSDP2's sum is the parameter's ``grad``, and not FSDP2's own."""


class DeferredStage(LeanStage):
    """A stage that defers the weight gradients of microbatches, but not of torch's shape inference."""

    def __init__(self, stage: PipelineStage, store: WeightGradients, offset: int = 0) -> None:
        super().__init__(
            stage.submod,
            stage.stage_index,
            stage.num_stages,
            stage.device,
            group=stage.group,
            dw_builder=lambda: partial(store.run, (self.stage_index, self._microbatch)),
            offset=offset,
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
        """Torch calls this method from release 2.15 on."""
        self._check_that_none_waits()
        super().start_gradient_reduction()  # pyright: ignore[reportAttributeAccessIssue]

    def _check_that_none_waits(self) -> None:
        for microbatch in range(self.chunks or 0):
            assert not self.store.waits((self.stage_index, microbatch)), (
                f"the gradients of stage {self.stage_index} are reduced before the gradients of "
                f"microbatch {microbatch} are complete"
            )

    def _add_gradient(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a gradient as autograd and then FSDP2 do."""
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
    """Maps gathered parameters to FSDP2's objects for them. A forward pass must have run before."""
    return {
        param._unsharded_param: param
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    }
