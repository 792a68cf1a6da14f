# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Receive buffers that are reused from one push to the next.

Fresh host memory costs a page fault for every 4 KiB, about as long as receiving into it.

    take -> LENT -- settle, still used --> HELD -- settle, no longer used --> FREE -> take
                 \- settle, not used / give_back ---------------------------^

LENT: an update receives into the buffer. HELD: weights that are served, or are the base of
deltas, lie in it. A pool belongs to one server and holds at most two versions: the one that is
served from it and the one that is being received.
"""

import threading
from collections.abc import Iterable

import torch


class BufferPool:
    """Lends buffers to one update at a time; ``pinned`` pins host memory, for copies to a GPU."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []

    @property
    def host_bytes(self) -> int:
        with self._lock:
            buffers = self._free + self._lent + self._held
        return sum(buffer.nbytes for buffer in buffers if buffer.device.type == "cpu")

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Lends a buffer, [num_bytes] uint8, whose contents are undefined."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if buffer.numel() == num_bytes and buffer.device == device:
                    del self._free[i]
                    break
            else:
                # Pinned memory that was freed is kept by torch, and pinned once.
                pinned = self._pinned and device.type == "cpu"
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._lent.append(buffer)
            return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Makes a lent buffer free again. Nothing may refer to it any more."""
        with self._lock:
            self._lent = [lent for lent in self._lent if lent is not buffer]
            self._reuse([buffer])

    def settle(self, in_use: Iterable[torch.Tensor]) -> None:
        """Ends a committed update. Buffers in which no tensor of ``in_use`` lies become free."""
        used = {storage_of(tensor) for tensor in in_use}
        with self._lock:
            known = self._held + self._lent
            self._held = [buffer for buffer in known if storage_of(buffer) in used]
            # Buffers that the update did not take have sizes that are no longer sent.
            self._free = []
            self._reuse([buffer for buffer in known if storage_of(buffer) not in used])
            self._lent = []

    def forget(self) -> None:
        """Drops the buffers of a failed update, whose last broadcast may still write to one of them."""
        with self._lock:
            self._lent = []

    def release(self) -> None:
        """Drops all buffers; no update may be open."""
        with self._lock:
            self._free, self._lent, self._held = [], [], []

    def _reuse(self, buffers: list[torch.Tensor]) -> None:
        # CUDA's caching allocator keeps freed memory itself, and others can use it meanwhile.
        self._free += [buffer for buffer in buffers if buffer.device.type == "cpu"]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
