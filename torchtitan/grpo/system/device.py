# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Handles differences between CPU and CUDA, with all workarounds that CPU and gloo need.

Torchtitan's modules assume CUDA when they are imported, so call :func:`settle_device` first.
"""

import ctypes
import os
import resource
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch._utils
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from torchtitan.grpo.system.network import interface_of, loopback_interface, source_address

if TYPE_CHECKING:
    from torchtitan.grpo.upstream.parallelism import ParallelDims

DeviceType = Literal["cpu", "cuda"]

_NON_BLOCKING = 1
"""Of a CUDA stream: it and the default stream do not wait for each other."""

TORCH_DTYPE_MAP = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def settle_device() -> DeviceType:
    # CUDA reads it when a process first uses the GPU. Streams that share one of its queues wait for
    # each other, and a push waits for a server. Training, its collectives, the snapshot and a push to
    # each server are more than the 8 queues of the default; 32 are the most.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # CUDA loads a kernel when it is first used, for which it may wait until all kernels that run have
    # ended. The kernel of a push runs until the server has received, and evaluations, checkpoints and
    # new shapes use kernels for the first time in the middle of a run. Loading them all at the start
    # takes a few seconds, and several hundred MB of the GPU for each rank. What is compiled in the run
    # is loaded when it has been compiled, which is in the first step as a rule.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if torch.cuda.is_available():
        return "cuda"

    # torchtitan.tools.utils calls this when it is imported.
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module)["device_type"] = "cpu"
            if hasattr(module, "device_module"):
                vars(module)["device_module"] = torch.cpu
    return "cpu"


def count_allocation_retries() -> int:
    """Returns how often this rank's GPU ran out of memory and freed cached blocks. Returns 0 on a CPU."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def take_peak_gib() -> float:
    """Returns the peak of the memory reserved on this rank's GPU since the last call, in GiB.

    On a CPU, returns the process's peak since its start, because the kernel keeps no other.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    else:
        # ru_maxrss is in KiB on Linux and in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak / 2**30


def choose_interfaces() -> None:
    """Makes process groups use the interface that leads to the other nodes, or loopback on one node.

    Call this before groups are created. By default, gloo uses the address of this host's name, and NCCL
    the first suitable interface, which may not connect the nodes. The user's settings are kept.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        return
    route = source_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    interface = interface_of(route)
    assert interface is not None, f"{route} is an address of this host"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": not as a prefix


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Makes FSDP2 sum gradients, because the loss is already divided by the tokens of all ranks."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def prepare_fsdp_for_gloo(model: nn.Module) -> None:
    """Makes FSDP2 reduce with plain sums, as gloo lacks PREMUL_SUM. They suffice, as the divide factor is 1."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def lower_timeouts(dims: "ParallelDims", timeout_seconds: float) -> None:
    """Sets the timeout of all process groups, as torchtitan's ``set_pg_timeouts`` does, also on a CPU.

    Collective over all ranks."""
    groups = [mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()]
    # No rank may use the shorter timeout while another is still in the slow first step.
    dist.barrier()
    for group in [*groups, dist.group.WORLD]:
        # Groups of meshes that the layout does not use have no real backend.
        if dist.get_backend(group) == "fake":
            continue
        _set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def visible_gpus() -> list[str]:
    """Returns this machine's GPUs as in ``CUDA_VISIBLE_DEVICES``. Training ranks use the first ones."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def num_training_gpus() -> int:
    # A dry run has no ranks, and knows how many there would be.
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
    return min(int(num_ranks), torch.cuda.device_count())


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a new stream that nothing else uses. It exists until the process ends.

    ``torch.cuda.Stream()`` hands out the same 32 streams in turn, also to NCCL. Unrelated work that shares
    a stream would be serialized (``c10/cuda/CUDAStream.h``).
    """
    return torch.cuda.ExternalStream(_create_stream(device), device=device)


def _create_stream(device: torch.device) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context the current one
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if status != 0 or handle.value is None:
        raise RuntimeError(
            f"The CUDA driver must make a stream on {device}, but cuStreamCreate returned {status}."
        )
    return handle.value
