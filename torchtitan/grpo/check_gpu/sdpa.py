# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names the kernel that masked attention with grouped heads gets from torch.

Flash attention takes no mask. If no other fused kernel takes the shapes, torch computes all scores of a
row, which needs memory and time of their square.
"""

from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from torchtitan.grpo.check_gpu.flex import AttentionCase
from torchtitan.grpo.check_gpu.parts import median_ms
from torchtitan.grpo.check_gpu.row import Row, Settings, judged

_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for each length and precision."""
    for seq in (1024, 2048):
        for dtype in (torch.bfloat16, torch.float32):
            yield _measure(AttentionCase("sdpa", settings, 4, seq), dtype)


def _measure(case: AttentionCase, dtype: torch.dtype) -> Row:
    inputs = [t.detach().to(dtype).requires_grad_() for t in case.inputs]
    ids, grad = case.ids(0), case.grad.to(dtype)

    def step() -> None:
        case.attend(ids, *inputs).backward(grad)

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    figures = {
        "step_ms": median_ms(step, case.device),
        "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
    }
    facts = {"longest": events[0].key[:60], "possible": ", ".join(_possible(case, ids, inputs))}
    holds = facts["possible"] != "MATH"
    name = f"{case.shape[0]} rows of {case.shape[1]}, {str(dtype)[6:]}"
    return judged(name, holds, "a fused kernel takes it", figures, facts=facts)


def _possible(case: AttentionCase, ids: torch.Tensor, inputs: list[torch.Tensor]) -> Iterator[str]:
    for name in _BACKENDS:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                case.attend(ids, *inputs)
            yield name
        except RuntimeError:  # torch says that no kernel is available
            continue
