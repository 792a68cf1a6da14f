# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gives the trainer the setting of NCCL that its servers have, where groups over NCCL need it."""

import logging
import os

from torchtitan.grpo.inference.kinds import kind_row
from torchtitan.grpo.types import ServerKind
from torchtitan.grpo.weight_wire.group_facts import SHARING_SETTING

logger = logging.getLogger(__name__)


def take_nccl_setting_of(kind: ServerKind, transport: str) -> None:
    """Sets ``NCCL_CUMEM_ENABLE`` as servers of a kind do, if weights are to travel over NCCL.

    Both ends of a communicator must agree on it (see `weight_wire/group_facts.py`). NCCL reads it
    once in a process, so call this before any process group exists. It holds for the trainer's own
    groups, too, which without cuMem use CUDA IPC and no symmetric memory and may be slower. So it
    is done only with ``weight_sync.transport = "nccl"``; with ``auto`` such servers receive from
    host memory. A value that the user has set stays.
    """
    value = kind_row(kind).nccl_settings.get(SHARING_SETTING)
    if transport != "nccl" or value is None or SHARING_SETTING in os.environ:
        return
    os.environ[SHARING_SETTING] = value
    logger.info(
        "Set %s=%s, as servers of inference.kind = %r do: both ends of a group over NCCL must agree "
        "(weight_sync.transport = 'nccl'). It also holds for the communicators of training.",
        SHARING_SETTING,
        value,
        kind,
    )
