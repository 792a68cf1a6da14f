# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Softmax over a vocabulary in slices: its sums, and gradients through it.

Several elementwise passes go over each slice. On a CPU they process one block of rows at a time,
which stays in the cache between the passes. On a GPU a block is the whole slice, because each
operation costs a kernel launch.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# 8 MiB of float32: small enough for the part of the last-level cache that a core has, and large
# enough that threads, which synchronize after each operation, rarely wait on a busy machine.
_BLOCK_LOGITS_PER_THREAD = 2**21


def row_blocks(tokens: int, width: int, device: torch.device) -> list[slice]:
    """Cuts the rows of [tokens, width] logits into blocks for elementwise work."""
    rows = max(tokens, 1)
    if device.type == "cpu":
        rows = max(1, torch.get_num_threads() * _BLOCK_LOGITS_PER_THREAD // max(width, 1))
    return [slice(begin, min(begin + rows, tokens)) for begin in range(0, tokens, rows)]


def _columns(ids: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the column [tokens, n] of each id in a slice, and whether the slice has it."""
    columns = ids - start
    inside = (columns >= 0) & (columns < width)
    return columns.clamp(0, width - 1), inside


class SoftmaxSums:
    """Running maximum and sums of the softmax, over slices and then over ranks.

    With ``x`` the logits minus the maximum so far, the sums are those of ``exp(x)`` and, for the
    entropy, of ``x * exp(x)``. They are rescaled when the maximum rises.

    Args:
        ids: [tokens, n] int, whose log-probabilities are computed. Id 0 is the first of the first slice.
        dtype: Dtype of the logits.
        with_entropy: Whether to compute the second sum.
        blocks: Blocks of rows, from :func:`row_blocks`.
        scratch: Flat memory with room for the logits of a block, which is overwritten. If there
            is only one block, it may be the memory of the logits themselves.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        dtype: torch.dtype,
        with_entropy: bool,
        blocks: list[slice],
        scratch: torch.Tensor,
    ) -> None:
        def full(value: float, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=ids.device)

        self._ids, self._with_entropy = ids, with_entropy
        self._blocks, self._scratch = blocks, scratch
        # Finite, so that a rank without any ids causes no inf - inf.
        self._maximum = full(torch.finfo(dtype).min, len(ids))
        self._logits = full(-torch.inf, *ids.shape)
        self._exp_sum = full(0.0, len(ids))
        self._weighted_sum = full(0.0, len(ids))

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Adds one slice, [tokens, width], whose first id is ``start``."""
        columns, inside = _columns(self._ids, start, logits.shape[1])
        self._logits = torch.where(inside, logits.gather(1, columns), self._logits)
        for rows in self._blocks:
            self._add_block(rows, logits[rows])

    def _add_block(self, rows: slice, logits: torch.Tensor) -> None:
        self._raise_maximum(rows, torch.maximum(self._maximum[rows], logits.amax(dim=1)))
        shifted = self._scratch[: logits.numel()].view_as(logits)
        torch.sub(logits, self._maximum[rows, None], out=shifted)
        if self._with_entropy:
            exponentials = shifted.exp()
            self._weighted_sum[rows] += shifted.mul_(exponentials).sum(dim=1)
        else:
            exponentials = shifted.exp_()
        self._exp_sum[rows] += exponentials.sum(dim=1)

    def reduce(self, group: ProcessGroup) -> None:
        """Combines the ranks' pieces of the vocabulary."""
        maxima = torch.cat((self._maximum[None], self._logits.t()))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        self._raise_maximum(slice(None), maxima[0])
        self._logits = maxima[1:].t()
        sums = torch.stack((self._exp_sum, self._weighted_sum))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        self._exp_sum, self._weighted_sum = sums.unbind()

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probabilities [tokens, n], and entropies or 0 and log normalizers [tokens]."""
        log_sum = self._exp_sum.log()
        logprobs = (self._logits - self._maximum[:, None]) - log_sum[:, None]
        entropy = torch.zeros_like(log_sum)
        if self._with_entropy:
            entropy = log_sum - self._weighted_sum / self._exp_sum
        return logprobs, entropy, self._maximum + log_sum

    def _raise_maximum(self, rows: slice, maximum: torch.Tensor) -> None:
        change = self._maximum[rows] - maximum
        scale = change.exp()
        if self._with_entropy:
            self._weighted_sum[rows] += self._exp_sum[rows] * change
            self._weighted_sum[rows] *= scale
        self._exp_sum[rows] *= scale
        self._maximum[rows] = maximum


class LogitGrads:
    """Turns a slice of logits into the gradient with respect to it.

    With ``p`` the softmax, ``H`` its entropy, ``y`` the ids of a token, ``g[y]`` and ``h`` the
    gradients of their log-probabilities and of the entropy, and ``G`` the sum of ``g[y]``::

        d log p[y] / d z[v] = 1[v = y] - p[v]
        d H / d z[v]        = -p[v] (log p[v] + H)
        gradient of z[v]    = sum over y of g[y] 1[v = y] - p[v] (h log p[v] + h H + G)

    Args:
        ids: [tokens, n] int, where id 0 is the first of the first slice. The first one of a token may
            be among the others, which differ from each other.
        normalizer: [tokens] logarithm of the sum of exponentials.
        entropy: [tokens], used only with ``entropy_grad``.
        logprob_grads: [tokens, n], ``g`` above.
        entropy_grad: [tokens], ``h`` above, or None for 0, which needs no second buffer.
        blocks: Blocks of rows, from :func:`row_blocks`.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        normalizer: torch.Tensor,
        entropy: torch.Tensor,
        logprob_grads: torch.Tensor,
        entropy_grad: torch.Tensor | None,
        blocks: list[slice],
    ) -> None:
        self._ids, self._blocks = ids, blocks
        self._normalizer = normalizer[:, None]
        self._at_ids = logprob_grads
        self._slope: torch.Tensor | None = None
        self._offset = -logprob_grads.sum(dim=1, keepdim=True)
        if entropy_grad is not None:
            self._slope = -entropy_grad[:, None]
            self._offset = self._offset + self._slope * entropy[:, None]

    def write(self, start: int, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the gradient of the slice whose first id is ``start``.

        Args:
            start: First id.
            logits: [tokens, width]; may be ``out``.
            out: [tokens, width].
        """
        for rows in self._blocks:
            block = torch.sub(logits[rows], self._normalizer[rows], out=out[rows])
            if self._slope is None:
                block.exp_().mul_(self._offset[rows])
            else:
                factors = torch.addcmul(self._offset[rows], block, self._slope[rows])
                block.exp_().mul_(factors)
        self._add_at_ids(start, out)

    def _add_at_ids(self, start: int, out: torch.Tensor) -> None:
        columns, inside = _columns(self._ids, start, out.shape[1])
        added = torch.where(inside, self._at_ids, 0.0)
        first, others = columns[:, :1], columns[:, 1:]
        out.scatter_(1, first, out.gather(1, first) + added[:, :1])
        if others.shape[1] > 0:
            # At most one of them adds more than 0 to an element, so that their order changes nothing.
            out.scatter_add_(1, others, added[:, 1:])
