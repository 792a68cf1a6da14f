# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The transports that carry versions to servers, with one row for each ``weight_sync.transport``.

Three of the values use process groups, because the backend of a group is chosen for each server when
the server joins (see `handshake.py`).

To add a transport, implement the classes of `interface.py` in a file of its own, add a
function here that makes it from the configuration, and name the new value in
``WeightSync.transport``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_sync.transports.disk_transport import DiskTransport
from torchtitan.grpo.weight_sync.transports.group_end import GroupSettings
from torchtitan.grpo.weight_sync.transports.group_transport import GroupTransport
from torchtitan.grpo.weight_sync.transports.interface import Transport
from torchtitan.grpo.weight_wire.version_files import VersionDirectories


def make_transport(config: JobConfig, plan: PushPlan, device: torch.device) -> Transport[Any]:
    """Makes the transport that ``weight_sync.transport`` names; called on every rank.

    Args:
        config: The checked configuration.
        plan: What each source rank sends.
        device: The training device.
    """
    return _MAKERS[config.weight_sync.transport](config, plan, device)


def _make_group_transport(
    config: JobConfig, plan: PushPlan, device: torch.device
) -> GroupTransport:
    sync = config.weight_sync
    assert sync.transport != "disk", "disk has a row of its own"
    # The configured address belongs to the host of rank 0. Sources on other hosts find their own.
    is_on_first_host = dist.get_rank() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = GroupSettings(
        master_address=sync.master_address if is_on_first_host else "auto",
        transport=sync.transport,
        timeout_seconds=sync.timeout_seconds,
        device=device,
        largest_bucket=max(b.num_bytes for source in plan.sources for b in source.buckets),
        deltas=sync.delta,
    )
    return GroupTransport(plan, settings)


def _make_disk_transport(config: JobConfig, plan: PushPlan, device: torch.device) -> DiskTransport:
    sync = config.weight_sync
    assert sync.disk_path is not None
    root, model = Path(sync.disk_path), Path(config.model.hf_assets_path)
    return DiskTransport(
        plan,
        lambda: VersionDirectories(root, model),
        sync.timeout_seconds,
    )


_MAKERS: dict[str, Callable[[JobConfig, PushPlan, torch.device], Transport[Any]]] = {
    "auto": _make_group_transport,
    "nccl": _make_group_transport,
    "host": _make_group_transport,
    "disk": _make_disk_transport,
}
