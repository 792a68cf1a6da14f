# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether the weights are in memory. A server that sleeps frees them, and all keys and values."""

import ctypes
import ctypes.util
import sys
from enum import Enum

import torch


class Residence(Enum):
    """The state of the weights::

    SERVED --sleep--> ASLEEP --wake--> EMPTY --all weights pushed--> SERVED
                         ^               |
                         +---- sleep ----+

    Requests are taken only in SERVED, and updates in SERVED and EMPTY.
    """

    SERVED = "served"
    ASLEEP = "asleep"
    EMPTY = "empty"

    @property
    def refusal(self) -> str | None:
        """Why no request is taken, and what to do; ``None`` if they are."""
        if self is Residence.ASLEEP:
            return (
                "The server is asleep. Send POST /resume_memory_occupation, and then push all of the "
                "weights."
            )
        if self is Residence.EMPTY:
            return "The server has slept and holds no weights. Push all of the weights first."
        return None


def return_freed_memory(device: torch.device) -> None:
    """Returns freed memory to the device or the operating system, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (libc := ctypes.util.find_library("c")) is not None:
        # Tensors of less than 32 MiB come from the heap, which glibc keeps.
        trim = getattr(ctypes.CDLL(libc), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
