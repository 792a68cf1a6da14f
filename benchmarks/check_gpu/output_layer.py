# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the fused log-probabilities as a run uses them: time, memory, and synchronizations.

`parity.py` measures their errors.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from check_gpu.parts import device_of, median_ms, product_tflops
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs

_TOP = 8

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states, weight and labels."""


def run(settings: Settings) -> Iterator[Row]:
    """Yields one row for each hidden size and for each of what a run may want to know."""
    device = device_of(settings)
    tokens, vocab, dims = (6144, 151_936, (1024, 2048)) if settings.on_gpu else (64, 997, (32,))
    dtype = torch.bfloat16 if settings.on_gpu else torch.float32
    peak = product_tflops(device, 8192 if settings.on_gpu else 256)
    for dim in dims:
        case = _make(tokens, vocab, dim, dtype, device)
        for name, settled in {
            "with entropy, the default": {"with_entropy": True, "trains_entropy": False},
            "without entropy": {"with_entropy": False},
            f"with trained entropy and {_TOP} other ids": {
                "with_entropy": True, "other_ids": torch.arange(_TOP, device=device).expand(tokens, -1),
            },
        }.items():  # fmt: skip
            yield _measure(f"{tokens} tokens, hidden {dim}, {name}", case, settled, peak)


def _make(tokens: int, vocab: int, dim: int, dtype: torch.dtype, device: torch.device) -> Case:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, device=device, dtype=dtype)
    weight = torch.randn(vocab, dim, device=device, dtype=dtype).mul_(dim**-0.5)
    labels = torch.randint(_TOP, vocab, (tokens,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _once(case: Case, settled: dict[str, Any]) -> None:
    """Runs forward and backward passes."""
    hidden, weight, labels = case
    hidden.grad = weight.grad = None
    packed_linear_logprobs(
        hidden, weight, labels, temperature=0.7, chunk_tokens=GRPO().logprob_chunk_tokens, **settled
    ).sum().backward()


def _measure(name: str, case: Case, settled: dict[str, Any], peak_tflops: float) -> Row:
    device, products = case[0].device, 6 * case[0].numel() * len(case[1])
    _once(case, settled)  # a GPU picks its kernels outside of the measurement
    figures = {
        "milliseconds": median_ms(lambda: _once(case, settled), device, rounds=5),
        "least_ms_of_products": products / peak_tflops / 1e9,
    }
    if device.type != "cuda":
        return Row(name, "measured", figures)
    case[0].grad = case[1].grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _once(case, settled)
    figures["extra_gpu_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    figures["synchronizations"] = float(_count_synchronizations(case, settled))
    holds = figures["synchronizations"] == 0
    return judged(name, holds, "the host never waits for the GPU", figures)


def _count_synchronizations(case: Case, settled: dict[str, Any]) -> int:
    """Returns how often torch says that the host waited for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _once(case, settled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
