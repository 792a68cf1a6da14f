# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Training steps beside many pushes, and a kernel that is used first while a push waits.

Streams that share one of CUDA's queues wait for each other, and loading a kernel may wait for all that
run. Both would make training wait for a server. The environment of this process says how many queues
there are and when kernels are loaded.
"""

import os
import time
from collections.abc import Iterator

import torch

from check_gpu.isolation import Isolation
from check_gpu.parts import device_of, join_alone
from check_gpu.row import Row, Settings, judged
from check_gpu.silent_server import broadcast_to_silent_server

_NUM_PUSHES, _KERNEL_SECONDS, _MAX_WAIT_SECONDS = 16, 3.0, 1.0
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for the first use of kernels and one for steps beside the pushes."""
    join_alone()
    facts = {name: os.environ[name] for name in _VARIABLES}
    yield _first_use(device_of(settings), facts)
    yield Isolation(settings).beside_silent(_NUM_PUSHES)


def _first_use(device: torch.device, facts: dict[str, str]) -> Row:
    """Uses kernels of torch and of cuBLAS that this process has not used."""
    payload = torch.ones(2**20, dtype=torch.uint8).pin_memory()
    free, total = torch.cuda.mem_get_info()
    values = torch.ones(64, 64, device=device)
    torch.mm(values, values)  # makes the handle of cuBLAS, which allocates
    with broadcast_to_silent_server(device, payload, _KERNEL_SECONDS) as is_under_way:
        begin = time.perf_counter()
        torch.erfinv(values)
        (values.bfloat16() @ values.bfloat16()).sum().item()
        seconds, still_waits = time.perf_counter() - begin, is_under_way()
    figures = {
        "seconds": seconds, "push_still_waits": float(still_waits),
        "gib_in_use_at_start": (total - free) / 2**30,
    }  # fmt: skip
    bound = f"within {_MAX_WAIT_SECONDS:g} s, while the push waits"
    holds = still_waits and seconds <= _MAX_WAIT_SECONDS
    case = "kernels that are used first"
    if facts["CUDA_MODULE_LOADING"] != "EAGER":  # either is an answer
        return Row(case, "measured", figures, facts=facts)
    return judged(case, holds, bound, figures, facts=facts)
