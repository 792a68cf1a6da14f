# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""CUDA streams that are not shared: ``torch.cuda.Stream()`` hands out 32 in turn, also to NCCL.

Users of the same stream wait for each other's queued work (``c10/cuda/CUDAStream.h``).
"""

import ctypes

import torch

# CU_STREAM_NON_BLOCKING: the stream and the default stream do not wait for each other.
_NON_BLOCKING = 1


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream that nothing else uses, for the life of the process."""
    return torch.cuda.ExternalStream(_create(device), device=device)


def _create(device: torch.device) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context the current one
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if status != 0 or handle.value is None:
        raise RuntimeError(
            f"The CUDA driver must make a stream on {device}, but cuStreamCreate returned {status}."
        )
    return handle.value
