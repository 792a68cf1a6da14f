# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compiles blocks whose weight gradients can be computed later than their input's gradient.

The backward pass of a compiled block is one graph without Python, which cannot store anything
as the layers of `weight_grads.py` do. A backend around inductor removes each matrix product
that gives the gradient of a linear layer's weight, and makes the graph return the two factors:

1. Each parameter enters the compiled graph through a tap, an autograd function.
2. The backward pass gives the tap a stand-in of the gradient's shape, which takes no memory and
   carries the factors. It is NaN, so that lost factors do not go unnoticed.
3. The tap puts the factors into the store, which multiplies them when the pipeline's schedule
   asks for it; outside the passes of such a schedule, the product is computed at once.

Other gradients, as of norms or of a weight that two layers share, remain in the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.shards import divided_like
from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.system.logs import logger

_aten = torch.ops.aten
_VIEWS = {
    _aten.t.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
}
"""Operations that may lie between the product and the gradient."""

_STAND_IN = "_deferred_factors"
"""Attribute of a stand-in that carries the factors."""

View = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class SplitGraph:
    """Counts linear layers, deferred weight gradients, and products left in the backward graph."""

    linears: int
    deferred: int
    products: int


class SplitBackend:
    """A backend of torch.compile: inductor, without the products that give weight gradients."""

    def __init__(self, store: WeightGradients) -> None:
        self.store = store
        self.graphs: list[SplitGraph] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Only these get a tap, and only their gradients may be replaced by stand-ins.
        tapped = frozenset(
            i for i, example in enumerate(example_inputs) if isinstance(example, nn.Parameter)
        )
        compile_inner = partial(self._compile_inner, _num_linears(graph), tapped)
        # Inductor would reuse the memory of factors that are activations. A graph from the cache
        # would come without the factors.
        with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
            compiled: Any = compile_fx(graph, example_inputs, inner_compile=compile_inner)

        def run(*inputs: Any) -> Any:
            if torch.is_grad_enabled():
                inputs = tuple(
                    _Tap.apply(input, self.store) if i in tapped and input.requires_grad else input
                    for i, input in enumerate(inputs)
                )
            return compiled(*inputs)

        return run

    def _compile_inner(
        self,
        num_linears: int,
        tapped: frozenset[int],
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        **settings: Any,
    ) -> Any:
        if not settings.get("is_backward"):
            return compile_fx_inner(graph, example_inputs, **settings)
        output = graph.graph.output_node()
        grads: list[Any] = list(output.args[0])  # pyright: ignore[reportArgumentType]
        found: dict[int, _Found] = {}
        for i, (grad, description) in enumerate(zip(grads, output.meta["desc"], strict=True)):
            cut = _find_product(grad) if _input_of(description) in tapped else None
            if cut is not None:
                found[i] = cut
        if not found:
            self._note(graph, num_linears, 0)
            return compile_fx_inner(graph, example_inputs, **settings)
        split, cuts = _cut(graph, grads, found)
        self._note(split, num_linears, len(cuts))
        return _with_stand_ins(
            compile_fx_inner(split, example_inputs, **settings), len(grads), cuts
        )

    def _note(self, graph: fx.GraphModule, num_linears: int, deferred: int) -> None:
        products = sum(node.target is _aten.mm.default for node in graph.graph.nodes)
        self.graphs.append(SplitGraph(num_linears, deferred, products))
        text = f"A compiled backward graph defers {deferred} of {num_linears} weight gradients"
        if deferred >= num_linears:
            logger.info(f"{text}.")
        else:
            logger.warning(
                f"{text} of its linear layers. The others are computed in the first half of the "
                "backward pass, so that the zero-bubble schedule fills less idle time. Gradients "
                "are correct. A schedule such as Interleaved1F1B may be as fast "
                "(parallelism.pipeline_parallel_schedule)."
            )


@dataclass(frozen=True)
class _Found:
    """A matrix product, and the views that are applied to it, in order."""

    product: fx.Node
    views: tuple[View, ...]
    grad: fx.Node


@dataclass(frozen=True)
class _Cut:
    """Two outputs of a compiled graph that are the factors of a weight's gradient, by index.

    ``left`` is the index of the gradient of the layer's output, and ``right`` that of the layer's
    input. ``example`` is a fake tensor like the weight's gradient.
    """

    left: int
    right: int
    views: tuple[View, ...]
    example: torch.Tensor

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        gradient = left.mm(right)
        for view, arguments in self.views:
            gradient = view(gradient, *arguments)
        return gradient


@dataclass(frozen=True)
class _Factors:
    left: torch.Tensor
    right: torch.Tensor
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, store):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.parameter, ctx.store = parameter, store
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        factors: _Factors | None = getattr(local, _STAND_IN, None)
        if factors is None:
            return grad, None

        def multiply(output_grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            return divided_like(grad, factors.multiply(output_grad, input))

        if not ctx.store.is_catching:
            return multiply(factors.left, factors.right), None
        ctx.store.put(ctx.parameter, factors.right, factors.left, multiply)
        return None, None


def _num_linears(graph: fx.GraphModule) -> int:
    """Counts a graph's linear layers, including those in checkpoints but not frozen ones."""
    parts = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    return sum(
        node.op == "call_function" and node.target is F.linear and not _is_frozen(node.args[1])
        for node in nodes
    )


def _is_frozen(weight: Any) -> bool:
    example = weight.meta.get("example_value") if isinstance(weight, fx.Node) else None
    return isinstance(example, torch.Tensor) and not example.requires_grad


def _input_of(description: Any) -> int | None:
    """Returns the index of the input that this output is the gradient of; None if it is no gradient."""
    while isinstance(description, SubclassGetAttrAOTOutput):  # a part of a DTensor
        description = description.base
    if not isinstance(description, GradAOTOutput):
        return None
    return description.grad_of.idx if isinstance(description.grad_of, PlainAOTInput) else None


def _find_product(grad: Any) -> _Found | None:
    """Returns the matrix product of which a gradient is a view, or None if the gradient is no such product."""
    node: Any = grad
    views: list[View] = []
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        # With a second input, the shape would depend on the graph's inputs.
        if len(node.users) > 1 or len(node.all_input_nodes) > 1 or node.kwargs:
            return None
        views.append((cast(Any, node.target), node.args[1:]))
        node = node.args[0]
    if not (isinstance(node, fx.Node) and node.target is _aten.mm.default and len(node.users) == 1):
        return None
    return _Found(node, tuple(reversed(views)), grad)


def _cut(
    graph: fx.GraphModule, grads: list[Any], found: dict[int, _Found]
) -> tuple[fx.GraphModule, dict[int, _Cut]]:
    outputs: list[Any] = [None if i in found else grad for i, grad in enumerate(grads)]
    places: dict[fx.Node, int] = {}

    def place(factor: Any) -> int:
        if factor not in places:
            places[factor] = len(outputs)
            outputs.append(factor)
        return places[factor]

    cuts = {}
    for i, one in found.items():
        left, right = one.product.args
        cuts[i] = _Cut(place(left), place(right), one.views, one.grad.meta["val"])
    before = graph.graph.output_node()
    split = _extract_graph_with_inputs_outputs(
        graph.graph,
        [node for node in graph.graph.nodes if node.op == "placeholder"],
        outputs,
        [PlainAOTOutput(i) for i in range(len(outputs))],
        ignore_must_be_in_fw_bw=True,
    )
    after = split.output_node()
    for key, value in before.meta.items():
        after.meta.setdefault(key, value)
    return fx.GraphModule(graph, split), cuts


def _with_stand_ins(
    compiled: Callable[[list[Any]], Sequence[Any]], num_grads: int, cuts: dict[int, _Cut]
) -> Callable[[list[Any]], list[Any]]:
    def run(inputs: list[Any]) -> list[Any]:
        outputs = compiled(inputs)
        grads = list(outputs[:num_grads])
        for i, cut in cuts.items():
            example = cut.example
            missing = torch.full((), torch.nan, dtype=example.dtype, device=example.device)
            grads[i] = missing.expand(example.shape)
            factors = _Factors(outputs[cut.left], outputs[cut.right], cut.multiply)
            setattr(grads[i], _STAND_IN, factors)
        return grads

    # The caller then passes its inputs in a list, which inductor empties to free them.
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run
