# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts what torch.compile generates: inductor lowers each graph for an H100, and nothing is built.

Inductor schedules and fuses the graph of real sizes, and writes the source of its Triton kernels.
The bytes are those that it counts itself, and the kernels are those of its schedule. A compiled
graph is never executed: what follows gets new fake tensors of the shapes of its outputs.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
from counting import StepCounter, attention_work, flops_of, is_attention, part_of
from torch._inductor import config, metrics
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch.fx.node import map_arg
from work import Work, kernel

Kernel = tuple[str | None, str, Work]
"""Part, or None for that of the caller, name and work."""


class _Lowered(Exception):
    """Ends a compilation after the source of its kernels has been written."""


class CompiledParts:
    """Takes inductor's place behind ``torch.compile``.

    Args:
        counter: Counts the kernels whenever a compiled graph runs.

    Attributes:
        num_kernels: Kernels that inductor has generated so far, by its own count, for all graphs.
    """

    def __init__(self, counter: StepCounter) -> None:
        self.counter, self.num_kernels = counter, 0
        self._found: list[Kernel] | None = None
        self._lower: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Counts what is compiled in the context."""
        compile_graph, self._lower = compile_fx.compile_fx, compile_fx.compile_fx_inner
        choose = AlgorithmSelectorCache.__call__

        def counted(model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
            settings["inner_compile"] = self._compile
            return compile_graph(model, inputs, *args, **settings)

        def compile_to_module(graph: Any) -> None:
            before = metrics.generated_kernel_count
            graph.codegen()
            self.num_kernels += metrics.generated_kernel_count - before
            self._found = [found for node in graph.scheduler.nodes for found in self._kernels(node)]
            raise _Lowered

        def first(cache: Any, name: str, choices: list[Any], *args: Any, **settings: Any) -> Any:
            # Trying all of them needs the device. They do the same work.
            return choose(cache, name, choices[:1], *args, **settings)

        with (
            mock.patch.object(compile_fx, "compile_fx", counted),
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            mock.patch.object(AlgorithmSelectorCache, "__call__", first),
            # What is folded is computed, which needs a real device.
            config.patch(joint_graph_constant_folding=False, force_disable_caches=True),
        ):
            yield
        torch._dynamo.reset()

    def _compile(self, graph: Any, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        self._found = None
        try:
            self._lower(copy.deepcopy(graph), inputs, **settings)
        except Exception:  # inductor wraps _Lowered into an error of its own
            if self._found is None:
                raise
        kernels = self._found or []

        inputs_of = {fx: i for i, fx in enumerate(graph.graph.find_nodes(op="placeholder"))}
        (outputs,) = graph.graph.find_nodes(op="output")

        def run(args: list[Any]) -> Any:
            counter = self.counter
            if not counter.is_paused:
                for part, name, work in kernels:
                    counter.ledger.add(part or counter.part(), work, name)
            found = [args[inputs_of[fx]] if fx in inputs_of else _new(fx) for fx in outputs.args[0]]
            args.clear()
            return found

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def _kernels(self, node: Any) -> list[Kernel]:
        if isinstance(node, NopKernelSchedulerNode):
            return []
        origins = {fx for part in node.get_nodes() for fx in getattr(part.node, "origins", ())}
        part, num_bytes = _part(origins), node.get_read_write_buffers_sizes()
        is_extern = isinstance(node, ExternKernelSchedulerNode) or node.is_template()
        if not is_extern:
            return [(part, "generated", kernel(num_bytes))]
        targets = [(fx, str(fx.target)) for fx in origins if fx.op == "call_function"]
        for fx, name in targets:
            if is_attention(name):
                tensors = [t for t in _values((fx.args, fx)) if isinstance(t, torch.Tensor)]
                return [("attention", name, attention_work(name, tensors, self.counter.shape))]
        for fx, name in targets:
            args, kwargs = map_arg((fx.args, fx.kwargs), lambda n: n.meta["val"])
            if flops := flops_of(fx.target, args, kwargs, fx.meta["val"]):
                itemsize = min(4, max(2, args[-1].element_size()))
                return [(_part({fx}) or part, name, kernel(num_bytes, flops, itemsize=itemsize))]
        if not num_bytes:
            return []
        return [(part, targets[0][1] if targets else "extern", kernel(num_bytes))]


def _new(output: Any) -> Any:
    """Returns what a graph gives for one of its outputs, without executing it."""
    value = output.meta["val"] if isinstance(output, torch.fx.Node) else output
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = value.shape, value.stride()
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _values(nodes: Any) -> list[Any]:
    found: list[Any] = []
    map_arg(nodes, lambda n: found.append(n.meta.get("val")))
    flat: list[Any] = []
    for value in found:
        flat += list(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def _part(origins: set[Any]) -> str | None:
    """Returns the part that most operations of a kernel belong to, None if no module is known."""
    parts: Counter[str] = Counter()
    for fx in origins:
        stack = fx.meta.get("nn_module_stack") or fx.meta.get("fwd_nn_module_stack")
        if stack:
            path = str(list(stack.values())[-1][0]).replace("['", ".").replace("']", "")
            parts[part_of(f"layers.{path}")] += 1
    return parts.most_common(1)[0][0] if parts else None
