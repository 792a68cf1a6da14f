# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attention over shared contexts with a kernel for sequences of several lengths.

The spans of a row form a tree (`data/shared_context.py`). A query sees its own span causally,
and the whole of each context above it, which the kernel computes in one call for each level of the
tree. The parts of one query are then merged by their log-sum-exp (https://arxiv.org/abs/2402.05099)::

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

The backward pass of the kernel recomputes probabilities as ``exp(score - lse)``. Given the merged
``lse`` and ``out`` it yields each part's summand of the gradients.

The attention is an operator of its own, which torch.compile does not trace into: the number of
queries that have a context differs between microbatches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

MAX_LEVELS = 4
"""Most contexts that a token sees above its own span. Each level takes a call of the kernel in each layer."""
_CAUSAL, _WHOLE = (-1, 0), (-1, -1)
_MERGED_TOKENS = 16384
"""Tokens that are merged at a time, in float32: it bounds the memory."""
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}
"""Allows groups of query heads, which torch 2.11 allows without the argument."""


class Level(NamedTuple):
    """The contexts at one depth of the trees of all rows, laid end to end.

    Attributes:
        queries: [n] int64, indices of the tokens below the contexts, which attend to the contexts.
        keys: [m] int64, indices of the tokens of the contexts.
        query_borders: [contexts + 1 or more] int32, where each context's tokens begin in ``queries``.
        key_borders: The same for ``keys``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_borders: torch.Tensor
    key_borders: torch.Tensor


@dataclass(frozen=True)
class Levels:
    """The levels of a microbatch, the contexts nearest to the root first.

    ``sizes``, [levels, 4] int64, is on the host. It has a level's number of queries, its number of keys,
    and the largest number of each for one context. The tensors of a level may be longer, but are
    read only up to these sizes.
    """

    levels: list[Level]
    sizes: torch.Tensor


def levels_of(
    contexts: tuple[np.ndarray, np.ndarray, np.ndarray],
    device: torch.device,
    sizes: tuple[int, int, int] | None = None,
) -> Levels:
    """Returns the levels of ``contexts``, given as begin, end and reach, [contexts] int64 each.

    These three are token indices in rows laid end to end. A context's tokens are [begin, end), and the
    later tokens that attend to it are [end, reach). Contexts are in ascending order of their begins.
    The tensors are padded to ``sizes``: the numbers of levels, of token indices, and of borders.
    """
    num_levels, num_places, num_borders = sizes or (0, 0, 0)
    begins, ends, reaches = contexts
    depths = _depths(begins, reaches)
    levels, numbers = [], []
    for depth in range(max(int(depths.max(initial=-1)) + 1, num_levels)):
        begin, end, reach = (of[depths == depth] for of in (begins, ends, reaches))
        places = [_places(end, reach), _places(begin, end)]
        numbers.append([*map(len, places), *(_longest(*r) for r in ((end, reach), (begin, end)))])
        borders = [_borders(end, reach), _borders(begin, end)]
        places = [np.pad(of, (0, max(num_places - len(of), 0))) for of in places]
        borders = [np.pad(of, (0, max(num_borders - len(of), 0)), "edge") for of in borders]
        levels.append(Level(*(_to(array, device) for array in (*places, *borders))))
    return Levels(levels, torch.tensor(numbers, dtype=torch.int64).view(-1, 4))


def _depths(begins: np.ndarray, reaches: np.ndarray) -> np.ndarray:
    """Returns the number of other contexts that enclose each context, [contexts] int64."""
    depths, above = np.zeros(len(begins), np.int64), list[int]()
    for index, (begin, reach) in enumerate(zip(begins.tolist(), reaches.tolist(), strict=True)):
        while above and above[-1] <= begin:
            above.pop()
        depths[index] = len(above)
        above.append(reach)
    return depths


def _longest(begins: np.ndarray, ends: np.ndarray) -> int:
    return int((ends - begins).max(initial=0))


def _places(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the indices in all ranges [begin, end), concatenated, [sum of ends - begins] int64."""
    lengths = ends - begins
    return np.arange(lengths.sum()) + np.repeat(ends - np.cumsum(lengths), lengths)


def _borders(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int32)


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # From memory that is not pinned, a copy would wait for the device.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@torch.library.custom_op("torchtitan_grpo::attend_to_tree", mutates_args=())
def attend_to_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    levels: list[torch.Tensor],
    sizes: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lets each token attend causally to its own span, and to the whole of each context above that span.

    Args:
        q: [tokens, heads, head_dim].
        k: [tokens, kv_heads, head_dim].
        v: The same.
        borders: [spans + 1 or more] int32, where spans begin in the rows laid end to end.
        longest: An upper bound of the number of tokens in a span.
        levels: The tensors of :class:`Level`, one level after the other.
        sizes: As in :class:`Levels`.

    Returns the output [tokens, heads, head_dim], and its log-sum-exp [heads, tokens] float32.
    """
    out, lse = _attend((q, k, v), (borders, borders), (longest, longest), scale, _CAUSAL)
    for level, (most_queries, most_keys) in _used(levels, sizes):
        where, keys, query_borders, key_borders = level
        parts = (q.index_select(0, where), k.index_select(0, keys), v.index_select(0, keys))
        most = (most_queries, most_keys)
        part, part_lse = _attend(parts, (query_borders, key_borders), most, scale, _WHOLE)
        del parts
        for begin in range(0, len(where), _MERGED_TOKENS):
            some = slice(begin, begin + _MERGED_TOKENS)
            _merge(out, lse, where[some], part[some], part_lse[:, some])
    return out, lse


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    where: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merges ``part``, the attention of the tokens ``where`` to further keys, into ``out`` and ``lse``."""
    own, own_lse = out.index_select(0, where), lse.index_select(1, where)
    merged_lse = torch.logaddexp(own_lse, part_lse)
    weights = [(of - merged_lse).exp().t().unsqueeze(2) for of in (own_lse, part_lse)]
    out.index_copy_(0, where, (weights[0] * own + weights[1] * part).to(out.dtype))
    lse.index_copy_(1, where, merged_lse)


@attend_to_tree.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("torchtitan_grpo::attend_to_tree_backward", mutates_args=())
def _attend_to_tree_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    levels: list[torch.Tensor],
    sizes: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bounds, most = (borders, borders), (longest, longest)
    dq, dk, dv = _gradients((grad, q, k, v, out, lse), bounds, most, scale, _CAUSAL)
    for level, most in _used(levels, sizes):
        where, keys, query_borders, key_borders = level
        of_queries = [tensor.index_select(0, where) for tensor in (grad, q, out)]
        of_keys = [tensor.index_select(0, keys) for tensor in (k, v)]
        parts = (
            of_queries[0], of_queries[1], *of_keys, of_queries[2], lse.index_select(1, where),
        )  # fmt: skip
        found = _gradients(parts, (query_borders, key_borders), most, scale, _WHOLE)
        for whole, places, part in zip((dq, dk, dv), (where, keys, keys), found, strict=True):
            whole.index_add_(0, places, part)  # each place once
    return dq, dk, dv


@_attend_to_tree_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, borders, ctx.longest, levels, sizes, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, borders, sizes, *levels)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, borders, sizes, *levels = ctx.saved_tensors
    found = torch.ops.torchtitan_grpo.attend_to_tree_backward(
        grad, q, k, v, out, lse, borders, ctx.longest, levels, sizes, ctx.scale
    )
    return (*found, None, None, [None] * len(levels), None, None)


attend_to_tree.register_autograd(_backward, setup_context=_setup_context)


def _used(
    levels: Sequence[torch.Tensor], sizes: torch.Tensor
) -> Iterator[tuple[list[torch.Tensor], tuple[int, int]]]:
    """Yields the tensors of each nonempty level, and the largest numbers of queries and keys of a context."""
    for index, (num_queries, num_keys, *most) in enumerate(sizes.tolist()):
        if num_queries:
            queries, keys, *borders = levels[4 * index : 4 * index + 4]
            yield [queries[:num_queries], keys[:num_keys], *borders], (most[0], most[1])


def _attend(
    inputs: tuple[torch.Tensor, ...],
    borders: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    # Not above: it imports the compiler.
    from torch.nn.attention import varlen as kernels

    return kernels.varlen_attn(  # pyright: ignore
        *inputs, *borders, *most,
        return_aux=kernels.AuxRequest(lse=True), scale=scale, window_size=window, **GROUPED_HEADS,
    )  # fmt: skip


def _gradients(
    inputs: tuple[torch.Tensor, ...],
    borders: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # It reads no random numbers without dropout.
    unused = torch.zeros(2, dtype=torch.uint64, device=inputs[0].device)
    return _backward_kernel()(
        *inputs, *borders, *most, window == _CAUSAL, unused, scale, list(window)
    )


def _backward_kernel() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns torch's backward kernel of attention, for which torch has no public function."""
    return torch.ops.torch_attn._varlen_attn_backward
