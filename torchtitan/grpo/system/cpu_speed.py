# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How fast this CPU multiplies matrices in bfloat16."""

import functools
import time
from pathlib import Path

import torch
import torch.nn.functional as F

FAST = 4 / 3
"""With this speedup and more, it is worth computing in bfloat16."""

_CPU_INFO = Path("/proc/cpuinfo")
_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last one is Arm's
_TOKENS, _IN, _OUT = 64, 576, 1536  # few tokens, as servers have
_REPETITIONS = 6


@functools.cache
def bfloat16_speedup() -> float:
    """Returns how many times faster this CPU multiplies matrices in bfloat16 than in float32.

    The bfloat16 instructions of a CPU or a virtual machine may be slow. The speedup is therefore measured
    once per process, for some tens of milliseconds on one thread. It is 1.0 without such instructions.
    One process must decide for all, because others may measure a value on the other side of :data:`FAST`.
    """
    words = _CPU_INFO.read_text().split() if _CPU_INFO.is_file() else []  # only Linux has it
    if _FLAGS.isdisjoint(words):
        return 1.0
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured()
    finally:
        torch.set_num_threads(num_threads)


def _measured() -> float:
    """Measures the speedup. Compares each dtype's fastest repetition, which other load disturbs the least."""
    inputs, weight = torch.ones(_TOKENS, _IN), torch.ones(_OUT, _IN)
    operands = [(inputs.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    fastest = [float("inf")] * 2
    for repetition in range(1 + _REPETITIONS):
        for index, pair in enumerate(operands):
            begin = time.thread_time()  # not counting what other processes take
            F.linear(*pair)
            seconds = time.thread_time() - begin
            if repetition > 0:  # the first one also prepares kernels
                fastest[index] = min(fastest[index], seconds)
    return fastest[0] / fastest[1]
