"""Stands for torch's attention over sequences of several lengths, whose kernel needs a GPU."""

import torch
import torch.nn.functional as F


def use_dense_varlen() -> None:
    """Makes models that are built from now on use :func:`dense_varlen`."""
    import torch.nn.attention.varlen as of_torch

    of_torch.varlen_attn = dense_varlen


def dense_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes, in float64, what torch documents. The host need not know the lengths.

    Queries beyond ``max_q`` are not computed, as in the kernel: they become NaN.
    """
    assert window_size == (-1, 0) and cu_seq_q is cu_seq_k and max_q == max_k
    assert enable_gqa or q.shape[1] == k.shape[1]
    places = torch.arange(len(q), dtype=torch.int32)
    ids = torch.searchsorted(cu_seq_q, places, right=True)
    mask = (ids[:, None] == ids[None]) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    one = [t.transpose(0, 1)[None].double() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=True)
    out = out[0].transpose(0, 1).to(q.dtype)
    is_computed = places - cu_seq_q[ids - 1] < max_q
    return torch.where(is_computed[:, None, None], out, torch.nan)
