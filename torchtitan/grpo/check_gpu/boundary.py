# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures fence and publish at the step boundary, for models of two sizes with random weights.

The training thread calls ``Snapshots.copy_into`` when it publishes and ``Snapshots.fence`` before
the next optimizer step. What a run spends at its boundary as a whole is a row of `end_to_end.py`.
"""

import statistics
from collections.abc import Iterator, Mapping

import torch

from torchtitan.grpo.check_gpu.parts import Pushed, Stopwatch, join_alone, make_pushed
from torchtitan.grpo.check_gpu.row import Row, Settings

_ROUNDS = 20
_SETTLED = 3
# Hidden size, intermediate size, layers, query heads, key-value heads, head size, vocabulary.
_SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
}
_SMALL_SIZES = {"0.1M": (64, 128, 2, 2, 1, 32, 512)}


def run(settings: Settings) -> Iterator[Row]:
    """Yields one row for each size."""
    device = torch.device(settings.device)
    join_alone()
    kept: list[Pushed] = []  # pinned memory must not be freed, and its addresses not be used again
    for name, size in (_SIZES if settings.on_gpu else _SMALL_SIZES).items():
        torch.manual_seed(0)
        shapes = _shapes(*size)
        parameters = {n: torch.randn(s, device=device) for n, s in shapes.items()}
        kept.append(make_pushed(parameters, device, num_slots=2))
        yield _measure(name, parameters, kept[-1], device)


def _shapes(
    dim: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of Qwen3 with tied embeddings."""
    layer = {
        "wq": (heads * head_dim, dim), "wk": (kv_heads * head_dim, dim),
        "wv": (kv_heads * head_dim, dim), "wo": (dim, heads * head_dim),
        "w1": (inner, dim), "w2": (dim, inner), "w3": (inner, dim),
        "norm1": (dim,), "norm2": (dim,), "q_norm": (head_dim,), "k_norm": (head_dim,),
    }  # fmt: skip
    shapes = {f"layers.{i}.{n}": shape for i in range(layers) for n, shape in layer.items()}
    return shapes | {"tok_embeddings": (vocab, dim), "norm": (dim,)}


def _measure(
    name: str, parameters: Mapping[str, torch.Tensor], pushed: Pushed, device: torch.device
) -> Row:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    publish, fence, host, waited = [], [], [], []
    for version in range(_ROUNDS):
        with Stopwatch(device) as publishing:
            pushed.snapshots.copy_into(version % 2)
        with Stopwatch(device) as copied:  # nothing hides the copy: the fence waits for all of it
            pushed.snapshots.fence()
        publish.append(publishing.wait_ms())
        fence.append(copied.wait_ms())
        host.append(publishing.host_ms + copied.host_ms)
        pushed.snapshots.read(version % 2)
        with Stopwatch(device) as late:  # the copy has ended, as it has after a whole step
            pushed.snapshots.fence()
        waited.append(late.wait_ms())
    figures = {
        "parameters": float(sum(p.numel() for p in parameters.values())),
        "publish_ms": statistics.median(publish[_SETTLED:]),
        "fence_after_copy_ms": statistics.median(waited[_SETTLED:]),
        "fence_without_overlap_ms": statistics.median(fence[_SETTLED:]),
        "host_ms": statistics.median(host[_SETTLED:]),
        "slot_host_bytes": 2.0 * pushed.plan.num_bytes,
    }
    if on_gpu:
        figures["extra_gpu_bytes"] = float(torch.cuda.max_memory_allocated() - before)
        figures["peak_gpu_bytes"] = float(torch.cuda.max_memory_allocated())
    pushed.snapshots.close()
    return Row(f"{name} parameters, float32 to bfloat16", "measured", figures)
