# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A pipeline stage that holds the memory of its exchanges only as long as it is needed.

Before release 2.15, torch's stage allocates a buffer for every microbatch of a step before the first
one arrives, and torch's runtime keeps every tensor that was sent until the step has ended. This
memory grows with the number of microbatches, whereas a schedule bounds the number of activations
that a rank holds at the same time. From 2.15 on, torch's stage allocates and frees as this one does;
what remains is that a pass may have any number of microbatches.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.pipeline.early_recompute import EarlyRecompute
from torchtitan.grpo.pipeline.offload_plan import OffloadPlan
from torchtitan.grpo.pipeline.pass_timer import Part, PassTimer

TORCH_ALLOCATES = hasattr(_RecvInfo, "allocate_buffer")
"""Whether torch's stage allocates a buffer when it receives, as it does from release 2.15 on."""
OUTPUTS = "_forward_chunk_states" if TORCH_ALLOCATES else "fwd_cache"
"""Attribute in which torch's stage keeps the outputs of forward passes."""


class LeanStage(PipelineStage):
    """A stage that allocates a buffer when it receives, and frees a tensor when it has been sent.

    Attributes:
        surrounding: Function that makes the context in which forward passes of microbatches run.
    """

    surrounding: Callable[[], AbstractContextManager[None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.surrounding = nullcontext
        self._leaving: list[dist.Work] = []
        self._arriving: dict[int, list[dist.Work]] = {}
        self.timer: PassTimer | None = None
        self.early: EarlyRecompute | None = None
        self.offload: OffloadPlan | None = None

    @classmethod
    def like(cls, stage: PipelineStage) -> "LeanStage":
        """Returns a new stage with the same module.

        A stage holds shapes and buffers of one schedule, so two schedules cannot share a stage.
        """
        return cls(
            stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group
        )

    def receive_on_demand(self, num_microbatches: int) -> None:
        """Drops the buffers that torch's initialization allocated for one microbatch.

        Args:
            num_microbatches: Number of microbatches of the next pass.
        """
        self.chunks = num_microbatches
        if not isinstance(self.args_recv_info, _OnDemand):
            self.args_recv_info = _OnDemand(self.args_recv_info[0], self.device)
        if self.grad_recv_info and not isinstance(self.grad_recv_info, _OnDemand):
            self.grad_recv_info = _OnDemand(self.grad_recv_info[0], self.device)

    @property
    def knows_shapes(self) -> bool:
        """Whether a schedule has run the stage and has therefore inferred what the stage receives."""
        return isinstance(self.args_recv_info, _OnDemand)

    def example_of_exchanges(self) -> torch.Tensor:
        """Returns a tensor like the ones that the stage exchanges. The stage must have run before."""
        received = self.grad_recv_info if self.is_first else self.args_recv_info
        assert isinstance(received, _OnDemand), "the stage has not run yet"
        return received.example()

    def receive_like(self, stage: "LeanStage", offset: int) -> None:
        """Makes this stage receive the same tensors as another stage with the same module.

        Args:
            stage: The other stage, whose :attr:`knows_shapes` must be True.
            offset: Number that is added to the numbers of stages.
        """
        assert isinstance(stage.args_recv_info, _OnDemand), "the stage has not run yet"
        self.args_recv_info = stage.args_recv_info.renumbered(offset)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            # Torch keeps outputs for a backward pass. Without one, they are not needed after sending.
            getattr(self, OUTPUTS).clear()
        marking = self.early.marking(fwd_chunk_id) if self.early is not None else nullcontext()
        offloading = self._offloading(fwd_chunk_id, args, kwargs)
        with self._timed("F"), marking, offloading, self.surrounding():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.args_recv_info.pop(fwd_chunk_id, None)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.offload is not None:
            self.offload.before_backward((self.stage_index, bwd_chunk_id))
        group = self._await_gradient(bwd_chunk_id)
        with self._timed("B" if kwargs.get("full_backward", True) else "I"), group:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        if self.offload is not None:
            self.offload.after_backward((self.stage_index, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("W"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Starts to receive. The stage waits for the tensors itself, so the result is empty."""
        self._arriving[bwd_chunk_id] = [
            self._begun(dist.irecv(op.tensor, group=op.group, group_src=op.group_peer))
            for op in super().get_bwd_recv_ops(bwd_chunk_id)
        ]
        return []

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.early is not None:
            self.early.forget()

    def recompute(self, microbatch: int) -> AbstractContextManager[Any]:
        """Recomputes blocks of a microbatch.

        The backward pass must run in the context that is returned.
        """
        assert self.early is not None, "the stage has no blocks that can be recomputed early"
        return self.early.recompute(microbatch)

    def _await_gradient(self, microbatch: int) -> AbstractContextManager[Any]:
        """Waits for the gradient of the output and recomputes blocks meanwhile."""
        arriving = self._arriving.pop(microbatch, [])
        if self.timer is not None:
            # When passes are timed, waiting and recomputing must not overlap.
            for work in arriving:
                work.wait()
        group = nullcontext()
        if self.early is not None and (arriving or self.timer is not None):
            with self._timed("R"):
                group = self.recompute(microbatch)
        if self.timer is None:
            for work in arriving:
                work.wait()
        return group

    def finish_sending(self) -> None:
        """Waits until all tensors have been sent."""
        for work in self._leaving:
            work.wait()
        self._leaving.clear()

    def _offloading(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        if self.offload is None:
            return nullcontext()
        received = [info.buffer for info in self.args_recv_info[microbatch]]
        inputs = (*received, *tree_leaves((args, kwargs)))
        return self.offload.forward((self.stage_index, microbatch), self.submod, inputs)

    def _timed(self, kind: Part) -> AbstractContextManager[None]:
        return nullcontext() if self.timer is None else self.timer.measure(self.stage_index, kind)

    def _send(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Sends tensors immediately.

        The result is empty, because the runtime would keep the tensors of operations that it runs.
        """
        self._leaving = [work for work in self._leaving if not work.is_completed()]
        for op in operations:
            sent = dist.isend(op.tensor, group=op.group, group_dst=op.group_peer)
            self._leaving.append(self._begun(sent))
        return []

    @staticmethod
    def _begun(work: dist.Work | None) -> dist.Work:
        assert work is not None, "a rank outside the pipeline's group exchanged a tensor"
        return work


class _OnDemand(dict[int, tuple[_RecvInfo, ...]]):
    """What a stage receives, by microbatch. Buffers are allocated at the first access."""

    def __init__(
        self, example: tuple[_RecvInfo, ...], device: torch.device, offset: int = 0
    ) -> None:
        super().__init__()
        self._example, self._device, self._offset = example, device, offset
        for info in example:
            info.buffer = None

    def renumbered(self, offset: int) -> "_OnDemand":
        """Returns a copy that receives from stages whose numbers are higher by ``offset``."""
        return _OnDemand(self._example, self._device, offset)

    def example(self) -> torch.Tensor:
        """Returns a tensor like the first one that is received, filled with zeros."""
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
        """Returns a buffer, or None for a model input and where no gradient is received."""
        meta = info.tensor_meta
        if info.is_root_arg or meta is None:
            return None
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
