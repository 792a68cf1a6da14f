# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The KV cache of the embedded server, with one slot for each running request.

A running request is row ``i`` of every step and owns slot ``i``. The engine keeps the rows
dense, so a step reads ranges of slots as views, without a gather. When requests end, the last
rows move into the free slots.

Invariants:
    - Positions ``[0, length)`` of a slot hold the computed tokens of its request. The other positions
      are masked, but must be finite, because an attention weight of 0 times NaN is NaN. They are
      therefore zeroed on allocation.
    - Storage grows by doubling and shrinks only in :meth:`SlotCache.release`, so it is allocated a
      few times in a run.
    - Slots are indexed by integers or by tensors on the cache's device. A list as index would be
      uploaded, and the host would wait for the upload.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache

from torchtitan.grpo.inference.embedded.step_layout import StepLayout


class SlotCache(Cache):
    """A KV cache whose rows differ in length. ``generation`` counts how often its storage was replaced."""

    step: StepLayout

    def __init__(self, max_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.max_slots = max_slots
        self.max_length = max_length
        self.generation = 0
        self.release()
        self._rows = torch.empty(0, dtype=torch.long)

    def release(self) -> None:
        """Frees all slots. No request may be using one. The next step allocates new slots."""
        self._num_slots = min(16, self.max_slots)
        self._length = min(128, self.max_length)
        # Keys and values, one tensor a layer: [2, slots, kv_heads, length, head_dim].
        self.slots: list[torch.Tensor] = []
        self.generation += 1

    def plan(self, step: StepLayout) -> None:
        self.step = step
        self._rows = torch.arange(step.num_rows, device=step.positions.device)
        longest = max(rows.length for rows in step.ranges)
        if step.whole is not None:
            # The padding of a short prompt may reach beyond the longest row.
            longest = max(longest, step.whole.ids.shape[1])
        self.reserve(step.num_rows, longest)

    def copy(self, source: int, target: int, length: int) -> None:
        self.reserve(target + 1, length)
        for layer in self.slots:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values, [1, kv_heads, num_tokens, head_dim], and returns them.

        Attention uses the returned tensors only for whole prompts. For other tokens it reads ``slots``.
        """
        if layer_idx == len(self.slots):
            self.slots.append(self._allocate(key_states))
        for slots, new in zip(self.slots[layer_idx], (key_states, value_states), strict=True):
            self._store(slots, new[0])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: rows have no common length, so positions and masks are passed explicitly."""
        return 0

    def _store(self, slots: torch.Tensor, new: torch.Tensor) -> None:
        step = self.step
        if step.whole is not None:
            num_prompts, length = step.whole.ids.shape
            block = new[:, step.num_rows : step.chunk_start].unflatten(1, (num_prompts, length))
            slots[step.whole.slots, :, :length] = block.transpose(0, 1)[step.whole.sources]
        if step.chunk is not None:
            place = slice(step.chunk.start, step.chunk.stop)
            slots[step.chunk.slots, :, place] = new[:, step.chunk_start :]
        # Last, because the padding of a short prompt lies where its row's token belongs.
        slots[self._rows, :, step.positions] = new[:, : step.num_rows].transpose(0, 1)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        kv_heads, head_dim = like.shape[-3], like.shape[-1]
        return like.new_zeros(2, self._num_slots, kv_heads, self._length, head_dim)

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for ``num_slots`` slots of ``length`` positions, and keeps the stored keys and values."""
        if num_slots <= self._num_slots and length <= self._length:
            return
        old_slots, old_length = self._num_slots, self._length
        while self._num_slots < num_slots:
            self._num_slots = min(2 * self._num_slots, self.max_slots)
        while self._length < length:
            self._length = min(2 * self._length, self.max_length)
        for i, old in enumerate(self.slots):
            self.slots[i] = self._allocate(old)
            self.slots[i][:, :old_slots, :, :old_length] = old
        self.generation += bool(self.slots)
