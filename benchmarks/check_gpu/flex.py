# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compiles each kind of packed attention: how long that takes, how often, and which kernel runs.

A compilation takes many seconds in the middle of a run. Different borders of sequences in rows of
one shape must not lead to another. The probe of an attestation runs without gradients, for which
torch.compile has a guard, so one more compilation is allowed there. Without a fused kernel for a mask
and grouped heads, torch computes all scores of a row, which the longest kernel and the memory show.
"""

import logging
import time
from collections.abc import Iterator
from typing import get_args

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from check_gpu.parts import device_of, median_ms
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.models.packed_attention import (
    PackedAttention,
    PackedAttentionKind,
    packed_mask,
)

_ROWS = 5
_BOUND = "no compilation after the first row, and at most one without gradients"


class AttentionCase:
    """Packed rows for one kind of attention, in the sizes of a small model.

    Args:
        kind: Kind of attention.
        settings: Settings of the check.
        rows: Number of rows.
        seq: Length of a row.
    """

    def __init__(self, kind: PackedAttentionKind, settings: Settings, rows: int, seq: int) -> None:
        self.kind: PackedAttentionKind = kind
        self.device = device_of(settings)
        self.attention, self.shape = PackedAttention(), (rows, seq)
        heads, kv_heads, dim = (16, 8, 128) if settings.on_gpu else (4, 2, 16)
        dtype = torch.bfloat16 if settings.on_gpu else torch.float32
        torch.manual_seed(0)
        self.inputs = [
            torch.randn(rows, n, seq, dim, dtype=dtype, device=self.device).requires_grad_()
            for n in (heads, kv_heads, kv_heads)
        ]
        self.grad = torch.randn(rows, heads, seq, dim, dtype=dtype, device=self.device)

    def reach(self, seed: int) -> torch.Tensor:
        """Returns the reach of tokens, [rows, seq], of sequences whose borders depend on the seed.

        The second half of each row is a context and two sequences that share it.
        """
        generator = torch.Generator().manual_seed(seed)
        seq = self.shape[1]
        ends = torch.rand(self.shape, generator=generator) < 8 / seq
        ends[:, [seq // 2 - 1, seq - 1]] = True
        places = torch.where(ends, torch.arange(1, seq + 1), seq)
        reach = places.flip(1).cummin(1).values.flip(1)
        reach[:, seq // 2 : seq * 3 // 4] = seq
        reach[:, seq * 3 // 4 : seq * 7 // 8] = seq * 7 // 8
        reach[:, seq * 7 // 8 :] = seq
        return reach.to(self.device)

    def attend(self, reach: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns the output of packed attention for the inputs of this case, or for others."""
        mask = packed_mask(reach, self.kind)
        return self.attention(*(inputs or self.inputs), mask)

    def train(self, seed: int) -> None:
        """Runs forward and backward pass."""
        self.attend(self.reach(seed)).backward(self.grad)


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for each kind of attention."""
    told = _Told()
    logging.getLogger().addHandler(told)
    for kind in get_args(PackedAttentionKind):
        told.lines.clear()
        case = AttentionCase(
            kind, settings, 4 if settings.on_gpu else 1, 2048 if settings.on_gpu else 128
        )
        try:
            figures = _measure(case)
        except Exception as error:
            yield failure(kind, error, settings)
            continue
        holds = figures["more_graphs"] == 0 and figures["more_graphs_without_gradient"] <= 1
        facts = {"longest_kernel": _longest_kernel(case), "said": " / ".join(told.lines)}
        yield judged(kind, holds, _BOUND, figures, facts=facts)


def failure(case: str, error: Exception, settings: Settings) -> Row:
    """Returns the row of a kind that cannot run, which a CPU need not."""
    reason = f"{type(error).__name__}: {error}"[:1500]
    return Row(case, "failed" if settings.on_gpu else "skipped", reason=reason)


def _measure(case: AttentionCase) -> dict[str, float]:
    begin = time.perf_counter()
    case.train(0)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    figures = {"first_pass_seconds": time.perf_counter() - begin, "graphs": _num_graphs()}
    for seed in range(1, _ROWS):
        case.train(seed)
    figures["more_graphs"] = _num_graphs() - figures["graphs"]
    figures["step_ms"] = median_ms(lambda: case.train(0), case.device)
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.train(0)
        figures["extra_gpu_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    trained = _num_graphs()
    with torch.no_grad():
        for seed in range(_ROWS):
            case.attend(case.reach(seed))
    figures["more_graphs_without_gradient"] = _num_graphs() - trained
    reach = case.reach(0)
    out = checkpoint(lambda *inputs: case.attend(reach, *inputs), *case.inputs, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    out.backward(case.grad)  # activation checkpointing calls the compiled function once more
    return figures


def _longest_kernel(case: AttentionCase) -> str:
    if case.device.type != "cuda":
        return ""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        case.train(0)
        torch.cuda.synchronize()
    return max(profiler.key_averages(), key=lambda event: event.self_device_time_total).key[:80]


def _num_graphs() -> float:
    """Returns how many graphs torch has compiled, with those of masks."""
    return float(counters["stats"]["unique_graphs"])


class _Told(logging.Handler):
    """Keeps what the project says, such as which fallback it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.startswith("torchtitan.grpo"):
            self.lines.append(record.getMessage()[:300])
