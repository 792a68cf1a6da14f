# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gives the trainer the settings of NCCL that its servers have, where groups over NCCL need them."""

import logging
import os

from torchtitan.grpo.inference.kinds import kind_row
from torchtitan.grpo.types import ServerKind

logger = logging.getLogger(__name__)


def take_nccl_settings_of(kind: ServerKind, transport: str) -> None:
    """Sets NCCL's variables as servers of a kind do, if weights are to travel over NCCL.

    Both ends of a communicator must agree on them (see `weight_wire/group_facts.py`). NCCL reads
    them once in a process, so they hold for the trainer's own communicators, too, which may
    become slower: without them NCCL uses neither NVLink SHARP nor buffers that it shares by cuMem.
    That is for the user to choose, with ``weight_sync.transport = "nccl"``; with ``auto`` the
    trainer keeps NCCL's own defaults, and such servers receive from host memory.

    Values that the user has set stay. Call it before any process group exists.

    Args:
        kind: ``inference.kind``.
        transport: ``weight_sync.transport``.
    """
    missing = {
        name: value
        for name, value in kind_row(kind).nccl_settings.items()
        if name not in os.environ
    }
    if transport != "nccl" or not missing:
        return
    os.environ.update(missing)
    logger.info(
        "Set %s, as inference.kind = %r does for its servers: both ends of a group over NCCL must "
        "agree (weight_sync.transport = 'nccl'). It also holds for the communicators of training.",
        " and ".join(f"{name}={value}" for name, value in missing.items()),
        kind,
    )
