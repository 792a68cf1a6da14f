"""Stands for torch's attention over sequences of several lengths, whose kernel needs a GPU."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def use_dense_varlen() -> None:
    """Makes models that are built from now on use :func:`dense_varlen`."""
    import torch.nn.attention.varlen as of_torch

    from torchtitan.grpo.models import tree_attention

    of_torch.varlen_attn = dense_varlen
    tree_attention._backward_kernel = lambda: dense_varlen_backward


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    window_size: Sequence[int],
    scale: float | None,
    mend: Callable[[torch.Tensor], torch.Tensor] = lambda sees: sees,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [heads, queries, keys] float64, -inf where a query does not see a key; and sequence ids."""
    places = [torch.arange(len(t), dtype=torch.int32) for t in (q, k)]
    borders = (cu_seq_q, cu_seq_k)
    ids = [torch.searchsorted(b, p, right=True) for b, p in zip(borders, places, strict=True)]
    sees = ids[0][:, None] == ids[1][None]
    within = [p - b[i - 1] for p, b, i in zip(places, borders, ids, strict=True)]
    behind = within[0][:, None] - within[1][None]
    left, right = window_size
    sees = sees & (behind >= 0) if right == 0 else sees
    sees = sees & (behind <= left) if left >= 0 else sees
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    return scores.masked_fill(~mend(sees), -math.inf), ids[0]


def dense_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    mend: Callable[[torch.Tensor], torch.Tensor] = lambda sees: sees,
) -> Any:
    """Computes, in float64, what torch documents. The host need not know the lengths.

    ``mend`` changes the mask, [queries, keys] bool, for a kernel that errs.
    Queries beyond ``max_q``, and those that see a key beyond ``max_k``, become NaN.
    """
    assert window_size[1] == 0 or window_size == (-1, -1)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa or q.shape[1] == k.shape[1]
    scores, ids = _scores(q, k, cu_seq_q, cu_seq_k, window_size, scale, mend)
    lse = scores.logsumexp(-1)
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), values).to(q.dtype)
    is_computed = torch.arange(len(q)) - cu_seq_q[ids - 1] < max_q
    is_computed &= cu_seq_k.diff()[ids - 1] <= max_k
    out = torch.where(is_computed[:, None, None], out, torch.nan).contiguous()
    # The kernel's is float32. The tests' bounds are far below that.
    return (out, lse) if return_aux is not None else out


def dense_varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None,
    window_size: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes, in float64, what the kernel computes from the output and its log-sum-exp."""
    assert window_size == [-1, 0 if is_causal else -1]
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    scores, _ = _scores(q, k, cu_seq_q, cu_seq_k, window_size, scale)
    p, groups = (scores - lse[..., None]).exp(), q.shape[1] // k.shape[1]
    one_each = [t.double().repeat_interleave(groups, dim=1) for t in (k, v)]
    delta = (grad.double() * out.double()).sum(-1).t()
    of_scores = p * (torch.einsum("qhd,khd->hqk", grad.double(), one_each[1]) - delta[..., None])
    of_scores = of_scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    dq = torch.einsum("hqk,khd->qhd", of_scores, one_each[0])
    dk = torch.einsum("hqk,qhd->khd", of_scores, q.double())
    dv = torch.einsum("hqk,qhd->khd", p, grad.double())
    dk, dv = (t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))
    return tuple(t.to(q.dtype).contiguous() for t in (dq, dk, dv))
