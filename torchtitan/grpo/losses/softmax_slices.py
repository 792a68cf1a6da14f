# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Softmax over slices of the vocabulary: its sums, and its gradients.

`softmax_passes.py` does the work for every logit. This module does the work for every token, and
chooses the logits that are kept for the backward pass. Where the weight's gradient, [vocab, dim],
will be needed, the forward pass already allocates the gradient's memory and keeps the logits of the first
slices there. The backward pass goes over the slices in the same order, and reads a slice's logits before it
writes the gradient over them. In float32, with four times as many tokens as hidden dims, two of eight
slices fit::

    rows of the gradient   | s0 | s1 | s2 | s3 | s4 | s5 | s6 | s7 |
    logits kept there      | of s0             | of s1             |

With at most as many tokens as hidden dims all logits fit.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchtitan.grpo.losses.softmax_passes import new_scratch, raise_maximum, sum_slice

# Narrower slices make matrix products slow and save little memory. Multiples of this width begin at
# addresses that are aligned for matrix products and vector instructions.
_MIN_SLICE = 128
_ALIGNMENT_BYTES = 64


def slice_width(tokens: int, vocab: int, chunk_tokens: int) -> int:
    """Returns the number of ids in a slice. A slice has at most ``chunk_tokens * vocab`` logits.

    The number is a multiple of 128 and at least 128, unless the whole vocabulary is smaller.
    """
    width = chunk_tokens * vocab // max(tokens, 1) // _MIN_SLICE * _MIN_SLICE
    return min(vocab, max(_MIN_SLICE, width))


class LogitSlices:
    """Computes [tokens, width] logits of one slice of the vocabulary at a time.

    ``hidden``, [tokens, dim], has the dtype in which products are computed. ``weight``, [vocab_local, dim],
    keeps its own dtype. ``dtype`` is that of the logits. The last slice may have fewer than ``width`` ids.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, width: int) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Tensor cores multiply half precision exactly and add in float32. A CPU rounds in between
        # or is slow at it, so that there the operands are converted, the weight slice by slice.
        mixed = hidden.is_cuda and hidden.dtype == weight.dtype
        self.hidden = hidden if mixed else hidden.to(self.dtype)
        self.weight = weight
        self.width = width

    def starts(self) -> range:
        vocab = len(self.weight) if len(self.hidden) else 0
        return range(0, vocab, max(self.width, 1))

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocates flat memory for as many numbers as a slice has logits."""
        return self.hidden.new_empty(len(self.hidden) * self.width, dtype=dtype)

    def shape(self, start: int) -> tuple[int, int]:
        return len(self.hidden), min(self.width, len(self.weight) - start)

    def part_of(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """Returns the view of ``buffer``, [tokens, width], for the slice at ``start``."""
        tokens, num_ids = self.shape(start)
        return buffer[: tokens * num_ids].view(tokens, num_ids)

    def weight_slice(self, start: int) -> torch.Tensor:
        """Returns the rows of the weight for the slice at ``start``, [width, dim], in the dtype of ``hidden``."""
        return self.weight[start : start + self.width].to(self.hidden.dtype)

    def compute(self, start: int, out: torch.Tensor) -> None:
        weight = self.weight_slice(start).t()
        if self.hidden.dtype == out.dtype:
            torch.mm(self.hidden, weight, out=out)
        else:
            torch.mm(self.hidden, weight, out_dtype=out.dtype, out=out)


class KeptLogits:
    """The logits kept for the backward pass, which lie in ``memory``, the memory of the weight's gradient.

    ``memory`` is contiguous, [vocab_local, dim], and may have another dtype than the logits.
    """

    def __init__(self, memory: torch.Tensor, slices: LogitSlices) -> None:
        self.memory, self._slices = memory, slices
        self._bytes = memory.view(-1).view(torch.uint8)
        slice_bytes = len(slices.hidden) * slices.width * slices.dtype.itemsize
        slice_bytes = -(-slice_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        row_bytes = memory.shape[1] * memory.element_size()
        # At least as far apart as the rows of the gradient; the module's docstring explains why.
        self._stride = max(slice_bytes, slices.width * row_bytes)

    @classmethod
    def reserve(cls, slices: LogitSlices) -> "KeptLogits | None":
        """Allocates the gradient of ``slices.weight``, or returns None if not even one slice fits into it."""
        weight, tokens = slices.weight, len(slices.hidden)
        first = tokens * slices.width * slices.dtype.itemsize
        if not slices.starts() or first > weight.numel() * weight.element_size():
            return None
        return cls(torch.empty_like(weight, memory_format=torch.contiguous_format), slices)

    def find(self, start: int) -> torch.Tensor | None:
        """Returns the memory for logits [tokens, width] of the slice at ``start``, or None if it has no place."""
        tokens, num_ids = self._slices.shape(start)
        begin = start // self._slices.width * self._stride
        end = begin + tokens * num_ids * self._slices.dtype.itemsize
        if end > len(self._bytes):
            return None
        return self._bytes[begin:end].view(self._slices.dtype).view(tokens, num_ids)


class SoftmaxSums:
    """Running maximum and sums of the softmax, over slices and then over ranks.

    ``ids``, [tokens, n] int, are the ids whose log-probabilities are wanted; 0 is the first id of this rank.
    """

    def __init__(
        self, ids: torch.Tensor, dtype: torch.dtype, temperature: float, with_entropy: bool
    ) -> None:
        def full(value: float, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=ids.device)

        self._ids, self._scale, self._with_entropy = ids, 1 / temperature, with_entropy
        # Finite, so that a rank without any ids causes no inf - inf.
        self._maximum = full(torch.finfo(dtype).min, len(ids))
        self._logits = full(-torch.inf, *ids.shape)
        self._exp_sum = full(0.0, len(ids))
        self._weighted_sum = full(0.0, len(ids))
        self._scratch: torch.Tensor | None = None

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Adds the [tokens, width] logits of the slice at ``start``."""
        if self._scratch is None:
            self._scratch = new_scratch(logits)
        sum_slice(
            logits, start, self._ids, self._scale, self._with_entropy,
            self._maximum, self._exp_sum, self._weighted_sum, self._logits, self._scratch,
        )  # fmt: skip

    def reduce(self, group: ProcessGroup) -> None:
        """Combines the maxima and sums of all ranks, each of which has a piece of the vocabulary."""
        maxima = torch.cat((self._maximum[None], self._logits.t()))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        raise_maximum(self._maximum, self._exp_sum, self._weighted_sum, maxima[0])
        self._logits = maxima[1:].t()
        sums = torch.stack((self._exp_sum, self._weighted_sum))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        self._exp_sum, self._weighted_sum = sums.unbind()

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probabilities [tokens, n], and entropies (or 0) and log normalizers, each [tokens]."""
        log_sum = self._exp_sum.log()
        logprobs = (self._logits - self._maximum[:, None]) - log_sum[:, None]
        entropy = torch.zeros_like(log_sum)
        if self._with_entropy:
            entropy = log_sum - self._weighted_sum / self._exp_sum
        return logprobs, entropy, self._maximum + log_sum


def gradient_factors(
    entropy: torch.Tensor, logprob_grads: torch.Tensor, entropy_grad: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns ``offset`` and ``slope`` of :func:`softmax_passes.write_grads`, [tokens].

    ``p`` is the softmax of the logits ``z`` divided by the temperature, ``H`` the entropy of ``p``, and ``y``
    are the ids of a token. ``g[y]``, [tokens, n], are the gradients of the ids' log-probabilities, ``G`` is
    the sum of ``g[y]``, and ``h``, [tokens] or None for 0, is the gradient of the entropy::

        d log p[y] / d z[v] = 1[v = y] - p[v]
        d H / d z[v]        = -p[v] (log p[v] + H)
        gradient of z[v]    = sum over y of g[y] 1[v = y] - p[v] (h log p[v] + h H + G)
    """
    offset = -logprob_grads.sum(dim=1)
    if entropy_grad is None:
        return offset, None
    return offset - entropy_grad * entropy, -entropy_grad
