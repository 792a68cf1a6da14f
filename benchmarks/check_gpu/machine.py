# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Says what the machine is, and measures the ceilings against which all other rows are read."""

import contextlib
import os
import time
from collections.abc import Iterator
from importlib import metadata

import torch
from torch.cuda import nccl

from check_gpu.parts import device_of, median_ms, product_tflops
from check_gpu.row import Row, Settings


def run(settings: Settings) -> Iterator[Row]:
    """Yields the start of CUDA, the versions, the rate of products, and that of copies."""
    device = device_of(settings)
    if settings.on_gpu:
        yield _start(device)  # first, because reading versions begins it
    yield Row("versions", "measured", facts=_facts())
    sizes = (8192, 2048) if settings.on_gpu else (256,)
    rates = {f"tflops_of_{size}": product_tflops(device, size) for size in sizes}
    yield Row("bfloat16 products", "measured", rates)
    yield _copies(device, 2**30 if settings.on_gpu else 2**20)


def _facts() -> dict[str, str]:
    facts = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts["triton"] = metadata.version("triton")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        facts["gpu_gib"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.1f}"
        facts["cudnn"] = str(torch.backends.cudnn.version())
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without NCCL
            facts["nccl"] = ".".join(map(str, nccl.version()))
    return facts | {"cores": str(os.cpu_count())}


def _start(device: torch.device) -> Row:
    """Measures CUDA's start, which loads all kernels or none (``CUDA_MODULE_LOADING``)."""
    begin = time.perf_counter()
    torch.ones(1, device=device).item()
    seconds = time.perf_counter() - begin
    free, total = torch.cuda.mem_get_info()
    figures = {"seconds": seconds, "gib_in_use": (total - free) / 2**30}
    facts = {"module_loading": os.environ.get("CUDA_MODULE_LOADING", "")}
    open_ends = "which part of the memory other processes use"
    return Row("start of CUDA", "measured", figures, facts=facts, cannot_tell=open_ends)


def _copies(device: torch.device, num_bytes: int) -> Row:
    """Measures copies in GB/s."""
    one, two = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pageable, gb = torch.zeros(num_bytes // 4, dtype=torch.uint8), num_bytes / 1e9
    ms = {
        "device_read_and_write": median_ms(lambda: two.copy_(one), device) / 2,
        "to_pinned_host": median_ms(lambda: pinned.copy_(one, non_blocking=True), device),
        "from_pinned_host": median_ms(lambda: one.copy_(pinned, non_blocking=True), device),
        "from_pageable_host": 4 * median_ms(lambda: one[: len(pageable)].copy_(pageable), device),
    }
    return Row("copies, GB/s", "measured", {name: gb / t * 1e3 for name, t in ms.items()})
