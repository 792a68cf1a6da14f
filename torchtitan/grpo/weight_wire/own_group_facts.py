# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out the facts about this process that `group_facts.py` compares.

The trainer, the embedded server and vLLM's workers call it, so this module needs only torch.
"""

import ctypes
import os

import torch
from torch.cuda import nccl

from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts

_LIBRARY = "libnccl.so.2"


def own_group_facts(device: torch.device) -> GroupFacts:
    """Returns the facts about this process, which sends from or receives on ``device``."""
    on_gpu = device.type == "cuda"
    return GroupFacts(
        device=device.type,
        # A plain string: its own type is a subclass, which vLLM's processes cannot send.
        torch=str(torch.__version__),
        nccl=nccl_version() if on_gpu else None,
        gpu=f"GPU-{torch.cuda.get_device_properties(device).uuid}" if on_gpu else None,
        settings={name: os.environ.get(name, "") for name in NCCL_SETTINGS},
    )


def nccl_version() -> str:
    """Returns the version of the NCCL that torch uses, such as ``2.29.7``.

    The library itself is asked. ``torch.cuda.nccl.version()`` names the NCCL that torch was
    built with, and images with SGLang or vLLM often hold a newer one.
    """
    try:
        # Torch has loaded it, so this is the same library and not a second one.
        library = ctypes.CDLL(_LIBRARY)
    except OSError:  # this torch contains its NCCL
        return ".".join(map(str, nccl.version()[:3]))
    code = ctypes.c_int()
    status = library.ncclGetVersion(ctypes.byref(code))
    assert status == 0, f"ncclGetVersion returned {status}"
    return version_text(code.value)


def version_text(code: int) -> str:
    """Returns ``2.29.7`` for NCCL's version code 22907."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
