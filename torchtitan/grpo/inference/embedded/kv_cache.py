# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keys and values of the running requests, one slot for each.

A running request is row ``i`` of every decode batch and owns slot ``i``. The engine keeps the rows
dense, so a decode step reads slots ``0 .. num_rows`` as a view, without a gather. When requests
end, the last rows move into the free slots.

Invariants:
    - Positions ``[0, length)`` of a slot hold the tokens of its request. The rest is finite but
      meaningless, and masked. (It is zeroed on allocation, because an attention weight of 0
      times NaN is NaN.)
    - Storage grows by doubling and never shrinks, so it is allocated a few times in a run.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers cache whose rows have different lengths.

    :meth:`plan_prefill` or :meth:`plan_decode` must be called before each forward.

    Args:
        max_slots: Maximum number of rows.
        max_length: Maximum number of tokens of a row.
    """

    def __init__(self, max_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._max_slots = max_slots
        self._max_length = max_length
        self._num_slots = min(16, max_slots)
        self._length = min(128, max_length)
        # One tensor a layer: [slots, kv_heads, length, head_dim].
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._slots = torch.empty(0, dtype=torch.long)
        self._sources: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._view_length = 0

    def plan_prefill(self, slots: torch.Tensor, sources: torch.Tensor | None, length: int) -> None:
        """Prepares for a forward over whole sequences.

        Args:
            slots: [num_new] long, slots of the new rows.
            sources: [num_new] long, for each slot the row of the forward's batch that it stores,
                or ``None`` if slot ``i`` stores row ``i``. Several slots may store one row.
            length: Padded length of the sequences.
        """
        self._slots, self._sources, self._positions = slots, sources, None
        self._reserve(int(slots.max()) + 1, length)

    def plan_decode(self, rows: torch.Tensor, positions: torch.Tensor, view_length: int) -> None:
        """Prepares for a forward over one token of each row.

        Args:
            rows: [num_rows] long, ``0 .. num_rows``.
            positions: [num_rows] long, position of each row's new token.
            view_length: Largest position plus 1, which is the length that attention reads.
        """
        self._slots, self._positions, self._view_length = rows, positions, view_length
        self._reserve(len(rows), view_length)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first ``length`` positions of slots ``sources`` over ``targets``."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values of a layer and returns those that attention reads.

        Args:
            key_states: [batch, kv_heads, seq, head_dim], after the rotary embedding.
            value_states: Same shape as ``key_states``.

        Returns:
            In a prefill, the arguments themselves. In a decode step, views of shape [num_rows,
            kv_heads, view_length, head_dim].
        """
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._positions is not None:
            keys[self._slots, :, self._positions] = key_states[:, :, 0]
            values[self._slots, :, self._positions] = value_states[:, :, 0]
            num_rows = len(self._slots)
            return keys[:num_rows, :, : self._view_length], values[
                :num_rows, :, : self._view_length
            ]
        length = key_states.shape[2]
        new_keys, new_values = key_states, value_states
        if self._sources is not None:
            new_keys, new_values = key_states[self._sources], value_states[self._sources]
        keys[self._slots, :, :length] = new_keys
        values[self._slots, :, :length] = new_values
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: rows have no common length, and positions and masks are passed explicitly."""
        return 0

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._num_slots, like.shape[1], self._length, like.shape[3])

    def _reserve(self, num_slots: int, length: int) -> None:
        if num_slots <= self._num_slots and length <= self._length:
            return
        old_slots, old_length = self._num_slots, self._length
        while self._num_slots < num_slots:
            self._num_slots = min(2 * self._num_slots, self._max_slots)
        while self._length < length:
            self._length = min(2 * self._length, self._max_length)
        for tensors in (self._keys, self._values):
            for i, old in enumerate(tensors):
                tensors[i] = self._allocate(old)
                tensors[i][:old_slots, :, :old_length] = old
