# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The two elementwise passes over a slice of logits: one sums them up, one turns them into gradients.

Both are torch operators, so that counters and tracers see one operator for each slice, also on fake
tensors. Each reads or writes all of its arguments except ``scratch``. On CUDA each is one Triton kernel
(`softmax_kernels.py`) that reads a logit once: the forward pass moves 4 bytes for each logit, the backward
pass 4 bytes and the size of a gradient. Elsewhere, several operations process one block of rows at a time,
which stays in a CPU's cache. The arithmetic is written twice, because the kernel needs a running maximum
in each lane, which would only add work to operations on whole blocks.
"""

import functools
import logging

import torch

logger = logging.getLogger()

# 8 MiB of float32: small enough for the part of the last-level cache that a core has, and large
# enough that threads, which synchronize after each operation, rarely wait on a busy machine.
_BLOCK_LOGITS_PER_THREAD = 2**21


def _sum_slice(
    logits: torch.Tensor,
    start: int,
    ids: torch.Tensor,
    scale: float,
    with_entropy: bool,
    maximum: torch.Tensor,
    exp_sum: torch.Tensor,
    weighted_sum: torch.Tensor,
    at_ids: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Adds a slice of logits, times ``scale``, to the sums of a softmax.

    With ``x`` the scaled logits minus the maximum so far, the sums are those of ``exp(x)`` and, for
    the entropy, of ``x * exp(x)``. They are rescaled when the maximum rises. All tensors are
    contiguous: logits [tokens, width] float32 or float64, ids [tokens, n] int, which may be outside
    of the slice, and the finite maximum and the sums [tokens]. ``at_ids`` [tokens, n] gets the
    scaled logits of the ids that the slice has.
    """
    columns, inside = _columns(ids, start, logits.shape[1])
    at_ids.copy_(torch.where(inside, logits.gather(1, columns) * scale, at_ids))
    if len(scratch) == 0:
        scratch = logits.new_empty(_block_size(logits))
    for rows in _row_blocks(logits, len(scratch)):
        block = logits[rows]
        highest = torch.maximum(maximum[rows], block.amax(dim=1) * scale)
        raise_maximum(maximum[rows], exp_sum[rows], weighted_sum[rows], highest)
        shifted = scratch[: block.numel()].view_as(block)
        torch.add(-highest[:, None], block, alpha=scale, out=shifted)
        if with_entropy:
            exponentials = shifted.exp()
            weighted_sum[rows].add_(shifted.mul_(exponentials).sum(dim=1))
        else:
            exponentials = shifted.exp_()
        exp_sum[rows].add_(exponentials.sum(dim=1))


def _write_grads(
    logits: torch.Tensor,
    start: int,
    ids: torch.Tensor,
    scale: float,
    normalizer: torch.Tensor,
    offset: torch.Tensor,
    slope: torch.Tensor | None,
    id_grads: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes ``p (offset + slope log p)`` of a slice's logits to ``out``, and adds ``id_grads`` at the ids.

    Here ``log p`` are the logits, times ``scale``, minus ``normalizer``. All tensors are
    contiguous: logits [tokens, width] float32 or float64, ``out`` in the same or a narrower dtype
    (it may be the logits), ids and ``id_grads`` [tokens, n], and the rest [tokens]; ``slope=None`` is 0.
    A token's ids after the first one must differ, unless they are outside of the vocabulary.
    """
    for rows in _row_blocks(logits, _block_size(logits)):
        in_place = out.dtype == logits.dtype
        block = out[rows] if in_place else torch.empty_like(logits[rows])
        torch.add(-normalizer[rows, None], logits[rows], alpha=scale, out=block)
        factors = offset[rows, None]
        if slope is not None:
            factors = torch.addcmul(factors, block, slope[rows, None])
        block.exp_().mul_(factors)
        _add_at_ids(block, ids[rows], start, id_grads[rows])
        if not in_place:
            out[rows] = block


def raise_maximum(
    maximum: torch.Tensor, exp_sum: torch.Tensor, weighted_sum: torch.Tensor, highest: torch.Tensor
) -> None:
    """Rescales the maximum and sums of :func:`sum_slice`, all [tokens], to ``highest``, in place."""
    change = maximum - highest
    scale = change.exp()
    weighted_sum.add_(exp_sum * change).mul_(scale)
    exp_sum.mul_(scale)
    maximum.copy_(highest)


sum_slice = torch.library.custom_op(
    "torchtitan_grpo::sum_slice",
    _sum_slice,
    mutates_args=("maximum", "exp_sum", "weighted_sum", "at_ids", "scratch"),
)
write_grads = torch.library.custom_op(
    "torchtitan_grpo::write_grads", _write_grads, mutates_args=("out",)
)


@sum_slice.register_kernel("cuda")
def _sum_slice_on_gpu(*arguments) -> None:
    kernels = _triton_kernels()
    (_sum_slice if kernels is None else kernels.sum_slice)(*arguments)


@write_grads.register_kernel("cuda")
def _write_grads_on_gpu(*arguments) -> None:
    kernels = _triton_kernels()
    (_write_grads if kernels is None else kernels.write_grads)(*arguments)


@functools.cache
def _triton_kernels():
    """Returns the module of Triton kernels. If the kernels do not run, logs a warning and returns None."""
    try:
        from torchtitan.grpo.losses import softmax_kernels

        row, ids = (
            torch.zeros(1, device="cuda"),
            torch.zeros(1, 1, dtype=torch.int64, device="cuda"),
        )
        logits = torch.zeros(1, 16, device="cuda")
        softmax_kernels.sum_slice(logits, 0, ids, 1.0, True, row, row, row, row[None], row)
        # As a training step calls it with entropy's gradient, and without.
        for slope, out in ((row, logits), (None, logits.bfloat16())):
            softmax_kernels.write_grads(logits, 0, ids, 1.0, row, row, slope, row[None], out)
        # A fault belongs here, and not to a later operation. Streams of pushes may wait for servers.
        torch.cuda.current_stream().synchronize()
    except torch.OutOfMemoryError:
        raise
    # Triton has no special error for a missing compiler, or a device that it does not know.
    except Exception as error:
        logger.warning(
            "The softmax over the vocabulary runs as separate operations, which move several times "
            f"the memory, because its Triton kernels do not run here: {error!r}"
        )
        return None
    return softmax_kernels


def new_scratch(logits: torch.Tensor) -> torch.Tensor:
    """Allocates the flat ``scratch`` of :func:`sum_slice` for slices up to the size of these logits."""
    # A CPU would get it from the system, page by page, for each slice anew.
    return logits.new_empty(_block_size(logits) if logits.device.type == "cpu" else 0)


def _block_size(logits: torch.Tensor) -> int:
    """Returns how many logits, at least one row, the elementwise operations process at a time."""
    # At most two tensors of a block are allocated, and so no more than a slice.
    size = max(_BLOCK_LOGITS_PER_THREAD, logits.numel() // 2)
    if logits.device.type == "cpu":
        size = min(size, torch.get_num_threads() * _BLOCK_LOGITS_PER_THREAD)
    return max(min(size, logits.numel()), logits.shape[1])


def _row_blocks(logits: torch.Tensor, size: int) -> list[slice]:
    tokens, width = logits.shape
    rows = size // width
    return [slice(begin, min(begin + rows, tokens)) for begin in range(0, tokens, rows)]


def _columns(ids: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the column [tokens, n] of each id in a slice, and whether the slice contains the id."""
    columns = ids - start
    inside = (columns >= 0) & (columns < width)
    return columns.clamp(0, width - 1), inside


def _add_at_ids(block: torch.Tensor, ids: torch.Tensor, start: int, id_grads: torch.Tensor) -> None:
    columns, inside = _columns(ids, start, block.shape[1])
    added = torch.where(inside, id_grads, 0.0)
    first, others = columns[:, :1], columns[:, 1:]
    block.scatter_(1, first, block.gather(1, first) + added[:, :1])
    if others.shape[1] > 0:
        # At most one of them adds more than 0 to an element, so that their order changes nothing.
        block.scatter_add_(1, others, added[:, 1:])
