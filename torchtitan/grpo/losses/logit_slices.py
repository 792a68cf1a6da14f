# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Logits of a vocabulary in slices: how wide, how computed, and where some are kept.

The gradient of the weight, [vocab, dim], is written in the backward pass only. Where it is
going to be wanted, its memory is taken in the forward pass already, and holds logits of the
first slices until then. The backward pass goes over the slices in the same order, and reads
the logits of a slice before it writes the gradient's rows of that slice. For float32, four
times as many tokens as dims, and eight slices, of which two fit::

    rows of the gradient   | s0 | s1 | s2 | s3 | s4 | s5 | s6 | s7 |
    logits kept there      | of s0             | of s1             |

No region begins before the rows of its own slice, so what is overwritten has been read. With
at most as many tokens as dims all logits fit.
"""

import torch

# Narrower slices make slow matrix products, and save nothing worth having. Multiples of it
# begin at addresses that products and vector instructions like.
_MIN_SLICE = 128
_ALIGNMENT_BYTES = 64


def accumulation_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Of logits, softmax and sums."""
    return torch.promote_types(hidden.dtype, torch.float32)


def slice_width(tokens: int, vocab: int, chunk_tokens: int) -> int:
    """Ids in a slice whose logits are at most as many as ``chunk_tokens`` tokens have.

    A multiple of 128 (at least 128 itself), unless the whole vocabulary is narrower.
    """
    width = chunk_tokens * vocab // max(tokens, 1) // _MIN_SLICE * _MIN_SLICE
    return min(vocab, max(_MIN_SLICE, width))


class LogitSlices:
    """Computes [tokens, width] tempered logits of one slice of the vocabulary at a time.

    Attributes:
        hidden: [tokens, dim], in the dtype of the matrix products.
        weight: [vocab_local, dim], as it was given.
        width: Ids in a slice; the last may have fewer.
        dtype: Of the logits.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, width: int
    ) -> None:
        self.dtype = accumulation_dtype(hidden)
        # Tensor cores multiply half precision exactly and add in float32. A CPU rounds in
        # between or is slow at it, so there the operands are widened, the weight by slices.
        mixed = hidden.is_cuda and hidden.dtype == weight.dtype
        self.hidden = hidden if mixed else hidden.to(self.dtype)
        self.weight = weight
        self.width = width
        self._temperature = temperature

    def starts(self) -> range:
        """First id of each slice; none where there is nothing to compute."""
        vocab = len(self.weight) if len(self.hidden) else 0
        return range(0, vocab, max(self.width, 1))

    def buffer(self) -> torch.Tensor:
        """Memory for the logits of one slice, uninitialised, flat."""
        return self.hidden.new_empty(len(self.hidden) * self.width, dtype=self.dtype)

    def part_of(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """The [tokens, width] beginning of ``buffer`` that the slice at ``start`` takes."""
        tokens, num_ids = len(self.hidden), min(self.width, len(self.weight) - start)
        return buffer[: tokens * num_ids].view(tokens, num_ids)

    def weight_slice(self, start: int) -> torch.Tensor:
        """[width, dim] in the dtype of the matrix products."""
        return self.weight[start : start + self.width].to(self.hidden.dtype)

    def compute(self, start: int, out: torch.Tensor) -> None:
        """Writes the logits of the slice at ``start`` to ``out``, [tokens, width]."""
        weight = self.weight_slice(start).t()
        if self.hidden.dtype == out.dtype:
            torch.mm(self.hidden, weight, out=out)
        else:
            torch.mm(self.hidden, weight, out_dtype=out.dtype, out=out)
        if self._temperature != 1:
            out.div_(self._temperature)


class KeptLogits:
    """Where in the memory of the weight's gradient the logits of a slice are kept.

    Args:
        memory: [vocab_local, dim] contiguous, that the gradient will take.
        tokens: Whose logits are kept.
        width: Of a slice: a multiple of 128, or the whole vocabulary.
        dtype: Of the logits; that of ``memory`` may be another.
    """

    def __init__(self, memory: torch.Tensor, tokens: int, width: int, dtype: torch.dtype) -> None:
        self._bytes = memory.view(-1).view(torch.uint8)
        self._vocab, self._tokens, self._width, self._dtype = len(memory), tokens, width, dtype
        slice_bytes = -(-self._num_bytes(width) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        row_bytes = memory.shape[1] * memory.element_size()
        # Not closer than the gradient's rows: see the module about the order of events.
        self._stride = max(slice_bytes, width * row_bytes)

    @classmethod
    def reserve(cls, slices: LogitSlices) -> torch.Tensor | None:
        """Memory for the gradient of ``slices.weight``, or None if it cannot hold a slice."""
        weight, tokens = slices.weight, len(slices.hidden)
        first = tokens * slices.width * slices.dtype.itemsize
        if not slices.starts() or first > weight.numel() * weight.element_size():
            return None
        return torch.empty_like(weight, memory_format=torch.contiguous_format)

    def find(self, start: int) -> torch.Tensor | None:
        """[tokens, width] of the slice at ``start``, or None where it is not kept."""
        num_ids = min(self._width, self._vocab - start)
        begin = start // self._width * self._stride
        end = begin + self._num_bytes(num_ids)
        if end > len(self._bytes):
            return None
        return self._bytes[begin:end].view(self._dtype).view(self._tokens, num_ids)

    def _num_bytes(self, num_ids: int) -> int:
        return self._tokens * num_ids * self._dtype.itemsize
