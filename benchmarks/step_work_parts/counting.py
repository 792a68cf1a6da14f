# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts the operations of a training step on fake tensors, each for the part that it belongs to."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from work import SUSTAINED_ATTENTION, Ledger, Shape, Work, collective, kernel

aten = torch.ops.aten

_VIEWS = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh", "aten.split", "aten.chunk",
          "aten._unsafe_view", "aten.unbind", "prim.", "aten.is_", "aten.set_", "aten.resize_", "inductor.")  # fmt: skip
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "bincount",
)
_COPIES = ("_to_copy", "copy_", "clone", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat",
           "all_gather_copy_in", "chunk_cat")  # fmt: skip
_FACTORS = {"allgather": 1, "reduce_scatter": 1, "allreduce": 2, "all_gather": 1, "all_reduce": 2}
_PICKS = ("embedding", "index_select", "gather", "index", "index_put", "scatter", "scatter_add",
          "embedding_dense_backward", "index_select_backward")  # fmt: skip
# A launch of torch's kernels over lists of tensors takes up to 320 chunks of 65,536 elements, and
# fewer tensors the more lists there are (ATen/native/cuda/MultiTensorApply.cuh).
_CHUNKS, _TENSORS = 320 * 65536, (110, 64, 48, 36, 30)
_ATTENTION = (
    "flex_attention",
    "_varlen_attn",
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
)


def size_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the elements of a tensor; an element that is repeated counts once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, stride in pairs if stride != 0 or n == 0) * tensor.element_size()


def attention_work(name: str, tensors: list[torch.Tensor], shape: Shape) -> Work:
    """Returns the work of an attention kernel, as a fused kernel without blocks outside the mask does it.

    Forward are two products of each query with the keys of its sequence before it, backward five:
    the scores are computed again. Queries, keys, values, outputs and their gradients are read and
    written once.

    Args:
        name: Name of the operation.
        tensors: What it reads and writes. The largest of them has the shape of the queries.
        shape: The sequences.
    """
    is_backward = "backward" in name
    heads = shape.sizes["num_attention_heads"] * shape.sizes["head_dim"]
    kv = shape.sizes["num_key_value_heads"] * shape.sizes["head_dim"]
    queries = next(t for t in tensors if t.numel() % heads == 0)
    tokens = queries.numel() // heads
    products, of_queries, of_kv, launches = (5, 4, 4, 3) if is_backward else (2, 2, 2, 1)
    flops = products * 2 * heads * shape.mean_keys * tokens
    num_bytes = (of_queries * heads + of_kv * kv) * tokens * queries.element_size()
    return kernel(num_bytes, flops, sustained=SUSTAINED_ATTENTION, launches=launches)


def is_attention(name: str) -> bool:
    return any(known in name for known in _ATTENTION)


class StepCounter(TorchDispatchMode):
    """Adds what runs on the device to a ledger; is entered inside of the fake mode.

    The part of an operation is that of the module whose forward pass runs, or of the autograd node
    whose backward pass runs, which :meth:`watch` marks. Copies, casts and collectives are parts
    of their own wherever they are.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.ledger = shape, Ledger()
        self.stack: list[str] = []
        self.default = "loss"
        self.is_paused = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to the part of this rank comes back here
        if _is_of_host(args, kwargs):
            with _disable_current_modes():  # the host's own tensors keep their values
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        out = func(*args, **kwargs)
        if not self.is_paused:
            self._count(func, args, kwargs, out)
        return out

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Counts what runs in the context for a part."""
        self.stack.append(part)
        try:
            yield
        finally:
            self.stack.pop()

    def part(self) -> str:
        if self.stack:
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        return self.default if node is None else node.metadata.get("part", self.default)

    def wait(self, what: str) -> None:
        """Notes that the host waits for the device."""
        if not self.is_paused:
            self.ledger.waits[f"{what} in {_caller()}"] += 1

    def _item(self, tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            self.wait("item")
        # False ends the loops of initialization that draw again until all values are in range.
        return False if tensor.dtype == torch.bool else 1.0

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not any(t.is_cuda for t in (*read, *outputs)) or _is_view(func, name):
            return
        self._count_wait(func, args, kwargs, out)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func.__name__, read, outputs)
            return
        short = func._schema.name.split("::")[-1]
        if is_attention(name):
            self.ledger.add("attention", attention_work(name, [*read, *outputs], self.shape), short)
            return
        part = "casts and copies" if short in _COPIES else self.part()
        self.ledger.add(part, _work_of(func, short, args, kwargs, read, outputs, out), short)

    def _count_wait(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.split("::")[-1]
        if name in _WAITS and args[0].is_cuda:
            self.wait(name)
        source, target = None, out
        if name == "_to_copy":
            source, blocks = args[0], not kwargs.get("non_blocking", False)
        elif name == "copy_":
            target, source = args[:2]
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if source is not None and source.device.type != target.device.type and blocks:
            # A copy that does not block from or to memory that is not pinned waits as well on most
            # machines, but for the copy alone.
            self.wait(f"copy from {source.device.type}")

    def _count_collective(self, name: str, read: Any, outputs: Any) -> None:
        factor = next(
            (f for known, f in _FACTORS.items() if known in name.replace("_base", "")), None
        )
        if factor is None:
            return
        group = torch.distributed.get_world_size()
        largest = max(t.numel() * t.element_size() for t in (*read, *outputs))
        if group > 1:
            self.ledger.add("collectives", collective(factor * largest * (group - 1) / group), name)

    def watch(self, model: nn.Module) -> None:
        """Follows the forward passes of the modules outside of compiled blocks."""
        for path, module in _outside_compiled(model):
            part = part_of(path)
            module.register_forward_pre_hook(self._entering(part), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leaving(part), always_call=True)

    def _entering(self, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            module._counted_ends = _nodes((args, kwargs))  # pyright: ignore
            self.stack.append(part)

        return hook

    def _leaving(self, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack:
                self.stack.pop()
            mark(_nodes(output), module._counted_ends, part)  # pyright: ignore

        return hook


def mark(nodes: list[Any], ends: list[Any], part: str) -> None:
    """Marks the autograd nodes from ``nodes`` back to ``ends`` that have no part yet."""
    seen = set(ends)
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        node.metadata.setdefault("part", part)
        nodes.extend(n for n, _ in node.next_functions if n is not None)


def part_of(path: str) -> str:
    """Returns the part that a module belongs to, by its path in the model."""
    names = path.split(".")
    if any("norm" in name for name in names):
        return "norms"
    for known, part in (("feed_forward", "MLP"), ("moe", "MLP"), ("attention", "attention"),
                        ("tok_embeddings", "embedding"), ("output", "head")):  # fmt: skip
        if known in names:
            return part
    # A block itself adds residuals; the model itself makes masks and looks up positions.
    return "norms" if "layers" in names else "attention"


def _outside_compiled(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:
        return
    yield path, model
    for name, child in model.named_children():
        yield from _outside_compiled(child, f"{path}.{name}")


def _nodes(tensors: Any) -> list[Any]:
    leaves = (t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))
    return [t.grad_fn for t in leaves if t.grad_fn is not None]


def _is_of_host(args: Any, kwargs: Any) -> bool:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    is_moved = torch.device(kwargs.get("device") or "cpu").type != "cpu"
    return bool(tensors) and all(type(t) is torch.Tensor for t in tensors) and not is_moved


def _is_view(func: Any, name: str) -> bool:
    return name.startswith(_VIEWS) or (func.is_view and "copy" not in name)


def _work_of(
    func: Any, name: str, args: Any, kwargs: Any, read: list[Any], outputs: list[Any], out: Any
) -> Work:
    written = [arg for arg in _written(func, args, kwargs) if arg.is_cuda]
    base = name.rstrip("_")
    if base in _PICKS:
        # Only the elements that are picked are read and written.
        least = sorted(size_of(t) for t in (*read, *outputs) if t.is_cuda)
        return kernel(2 * least[-2 if len(least) > 1 else -1] + sum(least[:-2]))
    unique = {id(t): t for t in read if t.is_cuda}
    fills = base in ("copy", "fill", "zero", "_foreach_copy") or "out" in kwargs
    num_bytes = sum(size_of(t) for t in unique.values())
    known = set(unique)
    num_bytes += sum(size_of(t) for t in outputs if t.is_cuda and id(t) not in known)
    num_bytes += 0 if fills else sum(size_of(t) for t in written)
    launches = 1
    if lists := [a for a in args if isinstance(a, (list, tuple)) and _is_tensors(a)]:
        per_launch = _TENSORS[min(len(lists), len(_TENSORS)) - 1]
        elements = sum(t.numel() for t in lists[0])
        launches = max(1, -(-len(lists[0]) // per_launch), -(-elements // _CHUNKS))
    flops, itemsize = flops_of(func, args, kwargs, out), 2
    if flops:
        factor = args[1 if base in ("addmm", "baddbmm") else 0]  # not what is added to
        itemsize = min(4, max(2, factor.element_size()))
    return kernel(num_bytes, flops, itemsize=itemsize, launches=launches)


def _is_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Returns the FLOPs of a product by torch's own counter, and 0 for everything else."""
    packet = getattr(func, "_overloadpacket", func)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    known = {} if packet is not aten.addmm else {k: v for k, v in kwargs.items() if k != "out"}
    return float(formula(*args[: 3 if packet is aten.addmm else 2], **known, out_val=out))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _caller() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torchtitan/" in path and "site-packages/torch/" not in path:
            return f"{path.split('/torchtitan/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the step"
