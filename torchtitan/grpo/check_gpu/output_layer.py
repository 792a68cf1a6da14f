# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the fused log-probabilities: time, memory, synchronizations, and errors."""

import statistics
import warnings
from collections.abc import Iterator

import torch

from torchtitan.grpo.check_gpu.parts import Stopwatch
from torchtitan.grpo.check_gpu.row import Row, Settings, judged
from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.linear_logprobs import linear_logprobs

_ROUNDS = 5
_COMPARED = 128
_MAX_LOGPROB_ERROR = 1e-3
_MAX_GRADIENT_ERROR = 2e-2

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states, weight and labels."""


def run(settings: Settings) -> Iterator[Row]:
    """Yields one row for each hidden size."""
    device = torch.device(settings.device)
    tokens, vocab, dims = (4096, 151_936, (1024, 2048)) if settings.on_gpu else (64, 997, (32,))
    for dim in dims:
        dtype = torch.bfloat16 if settings.on_gpu else torch.float32
        yield _measure(_make(tokens, vocab, dim, dtype, device), device)


def _make(tokens: int, vocab: int, dim: int, dtype: torch.dtype, device: torch.device) -> Case:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, device=device, dtype=dtype)
    weight = torch.randn(vocab, dim, device=device, dtype=dtype).mul_(dim**-0.5)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _once(case: Case) -> torch.Tensor:
    """Runs forward and backward passes; returns [tokens] logprobs."""
    hidden, weight, labels = case
    hidden.grad = weight.grad = None
    logprobs, _ = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=GRPO().logprob_chunk_tokens,
        with_entropy=False,
    )  # fmt: skip
    logprobs.sum().backward()
    return logprobs.detach()


def _measure(case: Case, device: torch.device) -> Row:
    logprobs = _once(case)  # a GPU picks its kernels outside of the measurement
    figures: dict[str, float] = {}
    if device.type == "cuda":
        case[0].grad = case[1].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _once(case)
        figures["extra_gpu_bytes"] = float(torch.cuda.max_memory_allocated() - before)
        figures["synchronizations"] = float(_count_synchronizations(case))
    times = []
    for _ in range(_ROUNDS):
        with Stopwatch(device) as watch:
            _once(case)
        times.append(watch.wait_ms())
    figures["milliseconds"] = statistics.median(times)
    logprob_error, gradient_error = _errors(case, logprobs)
    figures |= {"logprob_error": logprob_error, "hidden_gradient_error": gradient_error}
    tokens, dim, vocab = *case[0].shape, case[1].shape[0]
    return judged(
        f"{tokens} tokens, hidden {dim}, vocabulary {vocab}",
        logprob_error <= _MAX_LOGPROB_ERROR and gradient_error <= _MAX_GRADIENT_ERROR,
        f"logprobs within {_MAX_LOGPROB_ERROR:g} nats of float64, gradients within "
        f"{_MAX_GRADIENT_ERROR:g} of their norm",
        figures,
    )


def _count_synchronizations(case: Case) -> int:
    """Returns how often torch says that the host waited for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _once(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@torch.no_grad()
def _errors(case: Case, logprobs: torch.Tensor) -> tuple[float, float]:
    """Returns the largest error of a logprob, and the relative one of the gradient of states."""
    hidden, weight, labels = case
    exact_weight, some_labels = weight.double(), labels[:_COMPARED]
    logits = hidden[:_COMPARED].double() @ exact_weight.T
    exact = torch.log_softmax(logits, dim=-1)
    expected = exact.gather(1, some_labels[:, None])[:, 0]
    part = exact.exp().neg_()
    part.scatter_add_(1, some_labels[:, None], torch.ones_like(expected)[:, None])
    gradient = part @ exact_weight
    assert hidden.grad is not None
    difference = hidden.grad[:_COMPARED].double() - gradient
    error = (logprobs[:_COMPARED].double() - expected).abs().max()
    return float(error), float(difference.norm() / gradient.norm())
