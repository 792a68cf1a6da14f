# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Host memory that a GPU's copy engines reach without the help of the CPU."""

from collections.abc import Sequence
from typing import Any

import torch

# The memory is pinned for every CUDA context of the process.
_PORTABLE = 1


def pin(tensors: Sequence[torch.Tensor]) -> None:
    """Pins memory that exists already, such as memory that several processes have mapped.

    Each process must pin its own mapping, before the GPU copies to it or from it. The memory
    stays pinned until the process ends. Pinning waits for the device, so it belongs to the
    start of a run.

    Args:
        tensors: Contiguous tensors on the CPU. Empty ones are passed over.

    Raises:
        RuntimeError: If the operating system or the driver refuses, for instance because the
            container may not lock so much memory.
    """
    cudart: Any = torch.cuda.cudart()
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        result = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
        if int(result) != 0:
            raise RuntimeError(
                f"{tensor.nbytes / 1024**3:.2f} GiB of host memory must be pinned for weight "
                f"snapshots, but CUDA refused (cudaError {int(result)}). Allow the container to "
                "lock memory (docker run --ulimit memlock=-1), or lower "
                "weight_sync.num_slots or weight_sync.max_versions."
            )
