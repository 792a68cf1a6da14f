# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a rank of `long_rows.py`.

Rank 0 measures the times of parts of a layer, and both ranks measure the time of their link.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_job import answer_job


def seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """Returns the median time of a call, after a first call that is not counted."""
    run()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def linear_rate(settings: dict[str, Any]) -> float:
    """Returns the seconds per FLOP of matrix products of the layer's width."""
    tokens, dim, hidden = settings["linear_tokens"], settings["dim"], settings["ffn"]
    x, weight = torch.randn(tokens, dim), torch.randn(hidden, dim)
    return seconds(lambda: F.linear(x, weight)) / (2 * tokens * dim * hidden)


def attention_rates(settings: dict[str, Any], length: int) -> tuple[float, float]:
    """Returns the times of the forward and of the backward pass of causal attention.

    Both are in seconds per FLOP of the forward pass.
    """
    heads, dim = settings["measured_heads"], settings["head_dim"]
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    flops = 2 * length * length * dim * heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    output = forward()
    grad = torch.randn_like(output)
    inputs = (q, k, v)
    back = seconds(lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True), 3)
    return seconds(forward, 3) / flops, back / flops


def link_rate(num_bytes: int) -> float:
    """Returns the seconds per byte for sending a tensor to the other rank."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)

    def there_and_back() -> None:
        for rank in (0, 1):
            if dist.get_rank() == rank:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, rank)

    return seconds(there_and_back) / (2 * num_bytes)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if dist.get_rank() == 0:
        measured["linear"] = linear_rate(settings)
        measured["attention"] = {n: attention_rates(settings, n) for n in settings["lengths"]}
    dist.barrier()
    measured["link"] = link_rate(settings["link_bytes"])
    return measured


if __name__ == "__main__":
    answer_job(work)
