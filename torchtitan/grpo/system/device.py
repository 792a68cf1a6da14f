# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The seam between CPU and CUDA, and every workaround that a CPU or gloo needs.

``import torchtitan`` settles on CUDA wherever it finds no accelerator, and several of its
modules copy that choice when they are imported. :func:`settle_device` corrects the copies
that exist and what later imports will read; call it before importing ``torchtitan.train``.
"""

import os
import resource
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import torch
import torch._utils
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

DeviceType = Literal["cpu", "cuda"]


def settle_device() -> DeviceType:
    """Chooses CUDA where there is a GPU and CPU elsewhere, for all of torchtitan."""
    if torch.cuda.is_available():
        return "cuda"

    def available_device_type() -> str:
        return "cpu"

    # What torchtitan.tools.utils asks at import.
    torch._utils._get_available_device_type = available_device_type
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module)["device_type"] = "cpu"
            if hasattr(module, "device_module"):
                vars(module)["device_module"] = torch.cpu
    _use_host_memory_monitor()
    return "cpu"


def _use_host_memory_monitor() -> None:
    """Replaces the monitor that asks for CUDA properties, and the `lspci` call."""
    import torchtitan.components.metrics as upstream_metrics
    import torchtitan.tools.utils as upstream_utils

    upstream_metrics.build_device_memory_monitor = HostMemoryMonitor
    # No peak is known for a CPU; a finite figure keeps upstream's MFU defined (and near 0).
    upstream_utils.get_peak_flops = lambda device_name: 1e12


def keep_gloo_on_loopback(server_urls: Sequence[str]) -> None:
    """On one node, gloo needs no other interface than loopback.

    Otherwise it binds to whatever address this host's name resolves to. Call it before any
    process group exists.

    Args:
        server_urls: Servers that were not launched here; empty where all are.
    """
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    hosts = {urlsplit(url).hostname for url in server_urls}
    if not one_node or not hosts <= {"127.0.0.1", "localhost", "::1"}:
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"


class HostMemoryMonitor:
    """Torchtitan's device memory monitor, for a process without a device.

    Reports the process's peak resident memory since it started.
    """

    device_name = "cpu"

    def __init__(self) -> None:
        self.device_capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.device_capacity_gib = self.device_capacity / 1024**3

    def get_peak_stats(self):
        from torchtitan.components.metrics import DeviceMemStats

        # Kilobytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        gib, pct = peak / 1024**3, 100 * peak / self.device_capacity
        return DeviceMemStats(gib, pct, gib, pct, 0, 0)

    def reset_peak_stats(self) -> None:
        """The kernel keeps one peak for the process's whole life."""


def prepare_fsdp_for_gloo(model_parts: list[nn.Module]) -> None:
    """Makes FSDP2 reduce by plain sums, since gloo lacks PREMUL_SUM.

    Upstream sets the gradient divide factor to 1, so nothing is left out by it.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def lower_timeouts(dims: "ParallelDims", timeout_seconds: float) -> None:
    """Applies ``comm.train_timeout_seconds`` once the first step, with its slow starts, is done.

    Upstream's ``set_pg_timeouts`` does the same, but it needs a device index, which a CPU lacks.

    Args:
        dims: Meshes of the run, whose process groups get the timeout.
        timeout_seconds: Maximum duration of a collective from now on.
    """
    groups = [mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()]
    # No rank may use the shorter bound while another is still in what took longer.
    dist.barrier()
    for group in [*groups, dist.group.WORLD]:
        # Meshes that a layout does not use have groups without a backend.
        if dist.get_backend(group) == "fake":
            continue
        _set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def gpus_for_servers() -> tuple[list[str], bool]:
    """The GPUs that servers launched on this machine may use.

    Returns:
        Names as in ``CUDA_VISIBLE_DEVICES``, and whether they are the servers' own: those
        that the training ranks of this machine leave, or all of them where none is left.
    """
    if not torch.cuda.is_available():
        return [], False
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    spare = gpus[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]
    return spare or gpus, bool(spare)


def default_backend(device_type: str) -> str:
    """The collective backend of a device: NCCL on CUDA, gloo on CPU."""
    return "nccl" if device_type == "cuda" else "gloo"
