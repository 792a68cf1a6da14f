# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Copies of this rank's shards, taken at a step boundary.

On CUDA the copy, wire-dtype cast included, runs on a side stream while the training
stream goes on; :meth:`Snapshots.fence` orders the next optimizer step after it, on the
device alone. On CPU the copy is made in place.
"""

import torch

from torchtitan.grpo.models.shards import local_tensor


class Snapshots:
    """``num_slots`` copies of the local shards in the wire dtype.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        num_slots: Copies that may be alive at once.
        wire_dtype: Dtype in which weights travel.
        device: The training device.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        num_slots: int,
        wire_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sources = {name: local_tensor(p) for name, p in parameters.items()}
        self._slots = [
            {name: torch.empty_like(p, dtype=wire_dtype) for name, p in self._sources.items()}
            for _ in range(num_slots)
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: list[torch.cuda.Event | None] = [None] * num_slots
        self._last_copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of all slots on this rank."""
        return sum(t.nbytes for slot in self._slots for t in slot.values())

    @torch.no_grad()
    def copy_into(self, slot: int) -> None:
        """Starts the copy of the current shards; called on the training thread."""
        targets = list(self._slots[slot].values())
        sources = list(self._sources.values())
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._last_copied = self._copied[slot] = copied

    def fence(self) -> None:
        """Orders what the training stream does next after the last copy."""
        if self._last_copied is not None:
            torch.cuda.current_stream().wait_event(self._last_copied)

    def read(self, slot: int) -> dict[str, torch.Tensor]:
        """The slot's shards, once their copy is done; called on the pusher's thread."""
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        return self._slots[slot]
