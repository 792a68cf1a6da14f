# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines where snapshot slots lie: the interface, and slots that only their own rank sees.

A slot holds one version. Each rank copies its shards into it, and source ranks send the
version from it or gather from it:

    SharedHostSlots    memory of the source that the ranks of its host share (`slot_memory.py`)
    DeviceSlots        memory of the training device
    PinnedHostSlots    pinned host memory beside a training device
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch

from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.weight_sync.slot_layout import Shards


class SlotStorage(ABC):
    """All slots, as one rank sees them.

    Attributes:
        device: Device of the memory.
        shards: For each slot, the tensors into which this rank copies its shards, by native
            name and in the wire dtype.
    """

    device: torch.device
    shards: Sequence[Mapping[str, torch.Tensor]]

    @abstractmethod
    def buckets(self, slot: int) -> list[torch.Tensor] | None:
        """Returns the buckets of this source that lie in a slot, to be sent from there.

        ``None`` means that they do not, so that each version needs buffers of its own.
        """

    @abstractmethod
    def writers(self, source: int) -> Collection[int]:
        """Returns the ranks other than ``source`` that copy right into its slots."""

    @abstractmethod
    def shards_of_writers(self, slot: int) -> Mapping[int, Shards]:
        """Returns, on a source, the shards that other ranks copied into its slot, by rank."""


class _PrivateSlots(SlotStorage):
    """Slots that no other rank reaches: every rank sends its shards to the source.

    Args:
        parameters: Names and (sharded) parameters of this rank.
        names: Names of the parameters of which this rank contributes a part.
        num_slots: Number of slots.
        wire_dtype: Dtype in which weights travel.
        device: Device of the memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        names: Collection[str],
        num_slots: int,
        wire_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        sources = {name: local_tensor(parameters[name]) for name in names}
        self.shards = [
            {name: self._room_for(source, wire_dtype) for name, source in sources.items()}
            for _ in range(num_slots)
        ]

    @abstractmethod
    def _room_for(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def buckets(self, slot: int) -> None:
        return None

    def writers(self, source: int) -> Collection[int]:
        return ()

    def shards_of_writers(self, slot: int) -> Mapping[int, Shards]:
        return {}


class DeviceSlots(_PrivateSlots):
    """Slots in the memory of the training device."""

    def _room_for(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(source, dtype=dtype, device=self.device)


class PinnedHostSlots(_PrivateSlots):
    """Slots in pinned host memory."""

    def _room_for(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Contiguous, whatever the strides of the source: see `_StreamCopies.start`.
        return torch.empty(source.shape, dtype=dtype, device=self.device, pin_memory=True)
