# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Describes which tokens one forward pass computes, and where their keys and values are stored.

The tokens of a step form a single sequence of three parts:

    rows        one token of each row: the newest token of a running request, or the last token of
                this step's part of a prompt
    whole       prompts that are computed at once, all but their last tokens, padded to one length
    chunk       a part of one long prompt, all but its last token

All linear layers run once a step, and only attention tells the parts apart. The last token of a
prompt is computed as its row's token, because only its logits are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop``, exclusive, in which attention reads ``length`` cached positions.

    ``mask`` is additive, [rows, 1, 1, length], and ``None`` if all rows have this length.
    """

    start: int
    stop: int
    length: int
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class WholePart:
    """Prompts computed at once: ``ids`` [num_prompts, length] long, padded on the right.

    Slot ``slots[i]`` stores prompt ``sources[i]``, both [num_slots] long. Several slots may store one prompt.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True)
class ChunkPart:
    """A part of one prompt whose earlier tokens are in the slots already.

    ``ids``, [num_tokens] long, has at least one token and begins at position ``start``. The keys and values
    are stored in all ``slots``, and attention reads them from ``first_slot``. ``mask`` is additive,
    [num_tokens, start + num_tokens], and ``None`` if ``start`` is 0.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    first_slot: int
    start: int
    mask: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class StepLayout:
    """The tokens of one forward pass. ``positions`` is [num_rows] long, and ``ranges`` cover all rows."""

    positions: torch.Tensor
    ranges: list[RowRange]
    whole: WholePart | None = None
    chunk: ChunkPart | None = None

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def chunk_start(self) -> int:
        return self.num_rows + (0 if self.whole is None else self.whole.ids.numel())

    def flat_ids(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Returns the ids of all tokens, [1, num_tokens]."""
        parts = [row_ids]
        if self.whole is not None:
            parts.append(self.whole.ids.flatten())
        if self.chunk is not None:
            parts.append(self.chunk.ids)
        return torch.cat(parts).unsqueeze(0)

    def flat_positions(self) -> torch.Tensor:
        """Returns the positions of all tokens, [1, num_tokens]."""
        device = self.positions.device
        parts = [self.positions]
        if self.whole is not None:
            num_prompts, length = self.whole.ids.shape
            parts.append(torch.arange(length, device=device).repeat(num_prompts))
        if self.chunk is not None:
            parts.append(torch.arange(self.chunk.start, self.chunk.stop, device=device))
        return torch.cat(parts).unsqueeze(0)


def split_rows(lengths: Sequence[int], call_positions: int) -> list[RowRange]:
    """Cuts the rows into ranges, so that short rows need not read as many positions as the longest row.

    All rows of a range read as many positions as the range's longest row. A new range begins where reading
    the masked positions would cost more than one more attention call (``call_positions``).

    >>> [(r.start, r.stop, r.length) for r in split_rows([5, 6, 90, 5, 5], 20)]
    [(0, 2, 6), (2, 3, 90), (3, 5, 5)]
    """
    ranges: list[RowRange] = []
    start, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        wider = max(longest, length)
        in_vain = wider * (row - start + 1) - (total + length)
        if row > start and in_vain > call_positions:
            ranges.append(RowRange(start, row, longest))
            start, wider, total = row, length, 0
        longest, total = wider, total + length
    if lengths:
        ranges.append(RowRange(start, len(lengths), longest))
    return ranges


def upload(
    lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.long
) -> list[torch.Tensor]:
    """Returns each list as a tensor on the device. All take one copy, for which the host does not wait."""
    packed = torch.tensor(
        [number for numbers in lists for number in numbers],
        dtype=dtype,
        pin_memory=device.type == "cuda",
    )
    return list(packed.to(device, non_blocking=True).split([len(numbers) for numbers in lists]))
