# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs HelixPipe's tables (`tables/helix.py`), in which attention changes its rank by microbatch.

Torch's runtime ties each stage to one rank, and keeps the outputs of forward passes until their
backward pass. Here, a part with weights keeps only its inputs, from which its backward pass
recomputes the part. Attention keeps what autograd saves. Neither keeps outputs that were sent.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
)

from torchtitan.grpo.models.fsdp import BetweenMicrobatches
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.lowering import lower
from torchtitan.grpo.pipeline.mail import Mail
from torchtitan.grpo.pipeline.pass_marks import PassMarks, timed
from torchtitan.grpo.pipeline.pass_timer import Part, PassTimer
from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table
from torchtitan.grpo.pipeline.tables.simulate import simulate

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Held:
    """What a pass keeps for its backward pass.

    Attributes:
        inputs: The pass's inputs, which are the leaves of its autograd graph if it has one.
        outputs: The ends of that graph, or the loss; empty if the pass is to be recomputed.
    """

    inputs: Tensors
    outputs: Sequence[GradientEdge | torch.Tensor] = ()


class HelixSchedule:
    """Runs microbatches through the parts of a model.

    Args:
        stages: This rank's parts with weights, numbered among the parts with weights.
        attention: A module with ``mask(named_inputs)`` and ``forward(q, k, v, mask)``.
        make_table: Returns the table for a number of microbatches.
        costs: Costs of all parts; they determine the order of exchanges. Wrong ones cost only time.
        loss: Called on the rank of the last part once per microbatch; None without backward passes.
        recomputes: Whether parts with weights are recomputed, except for the last one.
        chunk_tokens: Number of tokens of a row for which a middle part is computed at a time; 0
            means all. Limits the memory of the feed-forward, also in the recomputation.
    """

    def __init__(
        self,
        stages: list[LeanStage],
        attention: nn.Module,
        make_table: Callable[[int], Table],
        costs: Costs,
        loss: Callable[..., torch.Tensor] | None = None,
        *,
        recomputes: bool = True,
        chunk_tokens: int = 0,
    ) -> None:
        self.stages = stages
        self.timer: PassTimer | None = None
        """Measures passes by part, if it is set."""
        self.marks: PassMarks | None = None
        self._attention, self._loss = attention, loss
        self._recomputes, self._chunk_tokens = recomputes, chunk_tokens
        self._parts = {2 * stage.stage_index: stage for stage in stages}
        self._between = {
            p: BetweenMicrobatches(s.submod, "keep_all") for p, s in self._parts.items()
        }
        self._last = 2 * (stages[0].num_stages - 1)
        self._rank, self._device = stages[0].group_rank, stages[0].device
        assert stages[0].group is not None, "the parts have no process group"
        self._mail = Mail(stages[0].group, self._device)
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._inputs: Sequence[tuple[Any, ...]] = ()
        self._named: Sequence[dict[str, Any]] = ()

        rank = self._rank  # not `self`: a cycle would keep the parts of a trial in memory

        @cache
        def plan(num_microbatches: int) -> tuple[Table, list[_Action]]:
            table = make_table(num_microbatches)
            actions = lower(table, simulate(table, costs), has_collectives=False)
            return table, actions[rank]

        self._plan = plan
        self._held: dict[tuple[int, int], Held] = {}

    @property
    def rank_of_output(self) -> int:
        first = self.stages[0]
        return (first.num_stages - 1) % first.group_size

    def run(
        self,
        inputs: Sequence[tuple[Any, ...]],
        named_inputs: Sequence[dict[str, Any]],
        targets: Sequence[torch.Tensor] | None = None,
        *,
        returns_outputs: bool = False,
        waiting: Sequence[Any] = (),
        beside: Any = None,
    ) -> list[torch.Tensor]:
        """Runs microbatches as :meth:`TableSchedule.run` does; collective over the pipeline."""
        assert not waiting and beside is None, "HelixPipe's tables have no gaps for other rows"
        self._table, actions = self._plan(len(named_inputs))
        self._inputs, self._named, self._targets = inputs, named_inputs, targets
        self._masks: dict[int, Any] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        if not self._shapes:
            self._learn_shapes()
        run: dict[Any, Callable[[_Action], None]] = {
            SEND_F: self._send, SEND_B: self._send, RECV_F: self._receive, RECV_B: self._receive,
            FORWARD: self._forward, FULL_BACKWARD: self._backward,
        }  # fmt: skip
        passes = (a for a in actions if a.computation_type == FULL_BACKWARD)
        self._reducing = set({a.stage_index: a for a in passes}.values())
        with torch.set_grad_enabled(not self._table.is_forward_only):
            for action in actions:
                if action.computation_type in run:
                    run[action.computation_type](action)
        self._mail.finish()
        assert not self._held, f"passes of {list(self._held)} were not taken back"
        for between in self._between.values():
            between.forget_parameters()
        self._inputs, self._named, self._targets = (), (), None
        self._masks.clear()
        outputs, self._outputs = self._outputs, {}
        return [outputs[m] for m in sorted(outputs)] if returns_outputs else []

    def take_metrics(self) -> dict[str, float]:
        return {}

    def example_of_exchanges(self) -> torch.Tensor:
        """Returns a tensor of the average size that parts exchange. The schedule must have run before."""
        numel = sum(s.numel() for stage in (0, 1) for s, _ in self._exchanged(stage, forward=True))
        return torch.zeros(numel // 2, dtype=self._shapes[-1][1], device=self._device)

    def _learn_shapes(self) -> None:
        """Gets the shapes that all layers exchange. The first part's rank finds them and broadcasts them."""
        found: list[Any] = [None]
        if 0 in self._parts:
            with torch.no_grad():
                sent = self._parts[0].submod(*self._inputs[0], **self._named[0])
            found = [[(tensor.shape, tensor.dtype) for tensor in sent]]
        group = self.stages[0].group
        dist.broadcast_object_list(found, group=group, group_src=0, device=self._device)
        self._shapes = found[0]

    def _exchanged(self, stage: int, *, forward: bool) -> list[tuple[torch.Size, torch.dtype]]:
        """Returns shapes and dtypes of the tensors that a part receives in a forward or backward pass."""
        before_attention = (stage % 2 == 1) == forward
        if before_attention:
            return self._shapes
        queries, dtype = self._shapes[0]
        attended = torch.Size((*queries[:2], queries[2:].numel()))
        return [(attended, dtype), self._shapes[-1]]

    def _peer(self, action: _Action, step: int) -> int:
        assert action.microbatch_index is not None
        return self._table.rank(Action(action.stage_index + step, "F", action.microbatch_index))

    def _send(self, action: _Action) -> None:
        forward = action.computation_type == SEND_F
        key = _key(action, 1 if forward else -1, forward=forward)
        self._mail.send(key, self._peer(action, 1 if forward else -1))

    def _receive(self, action: _Action) -> None:
        forward = action.computation_type == RECV_F
        shapes = self._exchanged(action.stage_index, forward=forward)
        peer = self._peer(action, -1 if forward else 1)
        self._mail.receive(_key(action, 0, forward=forward), shapes, peer)

    def _forward(self, action: _Action) -> None:
        part, microbatch = action.stage_index, action.microbatch_index
        assert microbatch is not None
        inputs = self._inputs[microbatch] if part == 0 else self._take(action, forward=True)
        with self._timed(part, "F", microbatch):
            run = self._attend if part % 2 else self._score if part == self._last else self._project
            outputs = run(part, microbatch, inputs)
        if part < self._last:
            self._mail.put(_key(action, 1, forward=True), outputs)

    def _attend(self, part: int, microbatch: int, inputs: Tensors) -> Tensors:
        *projected, residual = inputs
        leaves = _leaves(projected)
        if microbatch not in self._masks:
            self._masks[microbatch] = self._attention.mask(self._named[microbatch])  # pyright: ignore
        attended = self._attention(*leaves, self._masks[microbatch])
        if attended.requires_grad:
            self._held[part, microbatch] = Held(leaves, [get_gradient_edge(attended)])
        return attended.detach(), residual

    def _score(self, part: int, microbatch: int, inputs: Tensors) -> Tensors:
        leaves = _leaves(inputs)
        output = self._compute(part, microbatch, leaves)
        self._outputs[microbatch] = output.detach()
        if output.requires_grad:
            assert self._loss is not None and self._targets is not None
            loss = self._loss(output, self._targets[microbatch])
            self._held[part, microbatch] = Held(leaves, [loss])
        return ()

    def _project(self, part: int, microbatch: int, inputs: Tensors) -> Tensors:
        trains = torch.is_grad_enabled()
        if trains and not self._recomputes:
            leaves = _leaves(inputs) if part else inputs
            outputs = self._compute(part, microbatch, leaves)
            self._held[part, microbatch] = Held(leaves, [get_gradient_edge(t) for t in outputs])
            return tuple(tensor.detach() for tensor in outputs)
        if trains:
            self._held[part, microbatch] = Held(inputs)
        chunks = self._chunks(part, inputs)
        with torch.no_grad():
            if not chunks:
                return self._compute(part, microbatch, inputs)
            of_chunks = [
                self._compute(part, microbatch, tuple(t[:, c] for t in inputs), chunk=c)
                for c in chunks
            ]
        return _joined(of_chunks)

    def _compute(self, part: int, microbatch: int, inputs: Tensors, **chunk: slice) -> Any:
        stage = self._parts[part]
        arguments = (inputs,) if part else inputs
        with stage.surrounding():
            return stage.submod(*arguments, **self._named[microbatch], **chunk)

    def _chunks(self, part: int, inputs: Tensors) -> list[slice]:
        """Returns the slices of tokens in which a part is computed; none if it is computed at once."""
        size = self._chunk_tokens
        if not (size and 0 < part < self._last):
            return []
        return [slice(begin, begin + size) for begin in range(0, inputs[0].shape[1], size)]

    def _backward(self, action: _Action) -> None:
        part, microbatch = action.stage_index, action.microbatch_index
        assert microbatch is not None
        held = self._held.pop((part, microbatch))
        if part % 2:
            grads = self._take(action, forward=False)
            with self._timed(part, "B", microbatch):
                torch.autograd.backward(held.outputs, grads[:1])  # pyright: ignore
            back = (*_gradients(held.inputs), grads[1])
        elif held.outputs:
            grads = None if part == self._last else self._take(action, forward=False)
            with self._timed(part, "B", microbatch):
                back = self._add_gradients(action, held.inputs, held.outputs, grads)
        else:
            back = self._recompute_and_go_back(action, microbatch, held.inputs)
        if part:
            self._mail.put(_key(action, -1, forward=False), back)

    def _recompute_and_go_back(self, action: _Action, microbatch: int, inputs: Tensors) -> Tensors:
        part = action.stage_index
        if chunks := self._chunks(part, inputs):
            grads = self._take(action, forward=False)
            of_chunks = []
            with self._timed(part, "B", microbatch):
                for c in chunks:
                    leaves = _leaves([tensor[:, c] for tensor in inputs])
                    outputs = self._compute(part, microbatch, leaves, chunk=c)
                    of_chunk = tuple(grad[:, c] for grad in grads)
                    reduces = c is chunks[-1]
                    of_chunks.append(
                        self._add_gradients(action, leaves, outputs, of_chunk, reduces=reduces)
                    )
            return _joined(of_chunks)
        # When passes are timed, waiting and recomputing must not overlap.
        grads = self._take(action, forward=False) if self.timer is not None else None
        with self._timed(part, "R", microbatch):
            leaves = _leaves(inputs) if part else inputs
            outputs = self._compute(part, microbatch, leaves)
        grads = grads or self._take(action, forward=False)
        with self._timed(part, "B", microbatch):
            return self._add_gradients(action, leaves, outputs, grads)

    def _add_gradients(
        self,
        action: _Action,
        leaves: Tensors,
        outputs: Sequence[GradientEdge | torch.Tensor],
        grads: Tensors | None,
        *,
        reduces: bool = True,
    ) -> Tensors:
        """Adds up the gradients of a part's weights, and returns those of its inputs.

        FSDP reduces the sums in the last backward pass of a part, if ``reduces``.
        """
        part = action.stage_index
        self._between[part].before_backward(is_last=reduces and action in self._reducing)
        torch.autograd.backward(outputs, grads)  # pyright: ignore
        return _gradients(leaves) if part else ()

    def _take(self, action: _Action, *, forward: bool) -> Tensors:
        return self._mail.take(_key(action, 0, forward=forward))

    def _timed(self, part: int, kind: Part, microbatch: int) -> AbstractContextManager[None]:
        return timed(part, kind, microbatch, self.timer, self.marks)


def _key(action: _Action, step: int, *, forward: bool) -> tuple[int, str, int]:
    assert action.microbatch_index is not None
    return (action.stage_index + step, "F" if forward else "B", action.microbatch_index)


def _leaves(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(t.detach().requires_grad_(torch.is_grad_enabled()) for t in tensors)


def _joined(of_chunks: Sequence[Tensors]) -> Tensors:
    return tuple(torch.cat(tensors, dim=1) for tensors in zip(*of_chunks, strict=True))


def _gradients(leaves: Tensors) -> Tensors:
    grads = tuple(leaf.grad for leaf in leaves)
    assert all(grad is not None for grad in grads), "an input of a part has no gradient"
    return grads  # pyright: ignore[reportReturnType]
