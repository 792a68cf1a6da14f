# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts how often FlexAttention is compiled for packed rows of one shape.

A compilation takes many seconds in the middle of a run. Different borders of sequences in rows of
one shape must not lead to another. The probe of an attestation runs without gradients, for which
torch.compile has a guard, so one more compilation is allowed there.
"""

from collections.abc import Iterator

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

from torchtitan.grpo.check_gpu.row import Row, Settings, judged
from torchtitan.grpo.models.packed_attention import PackedAttention, packed_mask

_SEQ_LEN, _HEADS, _KV_HEADS, _HEAD_DIM = 4096, 16, 8, 128
_ROWS = 5


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for training and one for the probe."""
    device = torch.device(settings.device)
    attention = PackedAttention("flex")
    for seed in range(_ROWS):
        _pass(attention, _sequence_ids(seed, device))
        if seed == 0:
            first = _num_compiled()
    trained = _num_compiled()
    figures = {"first_row": float(first), "all_rows": float(trained), **_graphs()}
    yield judged(f"{_ROWS} packed rows", trained == 1, "one compilation", figures)
    with torch.no_grad():
        for seed in range(_ROWS):
            _attend(attention, _sequence_ids(seed, device))
    more = _num_compiled() - trained
    figures = {"more": float(more), **_graphs()}
    yield judged("the attestation's probe", more <= 1, "at most one more compilation", figures)


def _num_compiled() -> int:
    """Returns how many times FlexAttention itself was compiled, without the mask's function."""
    return sum(metrics.co_name == "flex_attention" for metrics in get_compilation_metrics())


def _graphs() -> dict[str, float]:
    return {"unique_graphs": float(counters["stats"]["unique_graphs"])}


def _sequence_ids(seed: int, device: torch.device) -> torch.Tensor:
    """Returns [1, seq] ids of sequences, whose borders depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    borders = torch.rand(_SEQ_LEN, generator=generator) < 8 / _SEQ_LEN
    return borders.cumsum(0)[None].to(device)


def _attend(attention: PackedAttention, ids: torch.Tensor) -> tuple[torch.Tensor, list]:
    torch.manual_seed(0)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    inputs = [
        torch.randn(1, n, _SEQ_LEN, _HEAD_DIM, device=ids.device, dtype=torch.bfloat16)
        for n in heads
    ]
    if torch.is_grad_enabled():
        inputs = [tensor.requires_grad_() for tensor in inputs]
    out = attention(*inputs, block_mask=packed_mask(ids, "flex"), enable_gqa=True)
    return out, inputs


def _pass(attention: PackedAttention, ids: torch.Tensor) -> None:
    out, _ = _attend(attention, ids)
    out.float().sum().backward()
