# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Receive buffers that are used again, push after push.

Fresh host memory costs a page fault every 4 KiB, about as much as receiving into it does.
So the buffers of the version before are kept for the next one:

    take -> LENT -- settle, still used --> HELD -- settle, no longer used --> FREE -> take
                 \\- settle, not used / give_back ---------------------------^

A pool belongs to one server; its memory is that of two versions at most: what is served
from it (or kept as the base of deltas) and as much again.
"""

from collections.abc import Iterable

import torch


class BufferPool:
    """Flat byte buffers; used by one update at a time."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """An uninitialised [num_bytes] uint8 buffer."""
        for i, buffer in enumerate(self._free):
            if buffer.numel() == num_bytes and buffer.device == device:
                del self._free[i]
                break
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._lent.append(buffer)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nothing refers to a lent buffer any more."""
        self._lent = [lent for lent in self._lent if lent is not buffer]
        self._reuse([buffer])

    def settle(self, in_use: Iterable[torch.Tensor]) -> None:
        """An update was committed; what ``in_use`` does not lie in can be used again."""
        used = {storage_of(tensor) for tensor in in_use}
        known = self._held + self._lent
        self._held = [buffer for buffer in known if storage_of(buffer) in used]
        # What the update did not take is of sizes that are not sent any more.
        self._free = []
        self._reuse([buffer for buffer in known if storage_of(buffer) not in used])
        self._lent = []

    def forget(self) -> None:
        """An update was dropped. Its buffers are too: a broken broadcast may still write."""
        self._lent = []

    def _reuse(self, buffers: list[torch.Tensor]) -> None:
        # CUDA's allocator keeps what it is given back, and others can use it meanwhile.
        self._free += [buffer for buffer in buffers if buffer.device.type == "cpu"]


def storage_of(tensor: torch.Tensor) -> int:
    """The memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()
