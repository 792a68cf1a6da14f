# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Triton kernels of `softmax_passes.py`, which read every logit of a slice once.

They are written by hand and take shapes as arguments, because the number of tokens and the width of
a slice differ from microbatch to microbatch: a kernel compiled for one shape would be compiled
again and again. Temporary numbers are in the dtype of the logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# A program has 128 threads, Triton's default. Each loads eight logits at a time, in two vector
# instructions of float32.
_BLOCK = 1024


@triton.jit(do_not_specialize=["start", "num_ids"])
def sums_kernel(
    logits,
    ids,
    maximum,
    exp_sum,
    weighted_sum,
    at_ids,
    start,
    width,
    num_ids,
    SCALE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    NUM_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a slice of logits to the sums of one row (online softmax).

    A running maximum is kept in each element of the block.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    old_maximum = tl.load(maximum + row)
    lanes = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], old_maximum.dtype) + old_maximum
    exps = tl.zeros([BLOCK], old_maximum.dtype)
    weighted = tl.zeros([BLOCK], old_maximum.dtype)
    for begin in range(0, width, BLOCK):
        inside = begin + lanes < width
        x = tl.load(logits + begin + lanes, mask=inside, other=float("-inf")) * SCALE
        higher = tl.maximum(highest, x)
        change = highest - higher
        decay = tl.exp(change)
        shifted = x - higher
        exp = tl.exp(shifted)
        if WITH_ENTROPY:
            # Outside of the row the product is -inf * 0.
            weighted = (weighted + exps * change) * decay + tl.where(inside, shifted * exp, 0.0)
        exps = exps * decay + exp
        highest = higher

    new_maximum = tl.max(highest, 0)
    change = highest - new_maximum
    old_change = old_maximum - new_maximum
    decay, old_decay = tl.exp(change), tl.exp(old_change)
    old_exps = tl.load(exp_sum + row)
    if WITH_ENTROPY:
        old_weighted = (tl.load(weighted_sum + row) + old_exps * old_change) * old_decay
        new_weighted = tl.sum((weighted + exps * change) * decay, 0)
        tl.store(weighted_sum + row, old_weighted + new_weighted)
    tl.store(exp_sum + row, old_exps * old_decay + tl.sum(exps * decay, 0))
    tl.store(maximum + row, new_maximum)

    numbers = tl.arange(0, NUM_IDS)
    columns = tl.load(ids + row * num_ids + numbers, mask=numbers < num_ids, other=-1) - start
    found = (columns >= 0) & (columns < width)
    x = tl.load(logits + columns, mask=found, other=0.0) * SCALE
    tl.store(at_ids + row * num_ids + numbers, x, mask=found)


@triton.jit(do_not_specialize=["start", "num_ids"])
def grads_kernel(
    logits,
    ids,
    normalizer,
    offset,
    slope,
    id_grads,
    out,
    start,
    width,
    num_ids,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes gradients of one block of a row, which may replace the logits."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row * width + columns, mask=inside, other=0.0) * SCALE
    logprobs = x - tl.load(normalizer + row)
    factors = tl.zeros([BLOCK], logprobs.dtype) + tl.load(offset + row)
    if slope is not None:
        factors += tl.load(slope + row) * logprobs
    grads = tl.exp(logprobs) * factors
    for i in range(num_ids):
        column = tl.load(ids + row * num_ids + i) - start
        # Most blocks have none of the ids, of which there may be more than a hundred.
        if (column >= begin) & (column < begin + BLOCK):
            grads += tl.where(columns == column, tl.load(id_grads + row * num_ids + i), 0.0)
    tl.store(out + row * width + columns, grads, mask=inside)


def sum_slice(
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
    """Does `softmax_passes.sum_slice` with one kernel, which does not use ``scratch``."""
    tokens, width = logits.shape
    num_ids = ids.shape[1]
    launch: Any = sums_kernel[(tokens,)]
    # A kernel is launched on the current device, which need not be that of its tensors.
    with torch.cuda.device_of(logits):
        launch(
            logits, ids, maximum, exp_sum, weighted_sum, at_ids, start, width, num_ids,
            SCALE=scale, WITH_ENTROPY=with_entropy, NUM_IDS=triton.next_power_of_2(num_ids),
            BLOCK=_BLOCK,
        )  # fmt: skip


def write_grads(
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
    """Does `softmax_passes.write_grads` with one kernel."""
    tokens, width = logits.shape
    launch: Any = grads_kernel[(tokens, triton.cdiv(width, _BLOCK))]
    with torch.cuda.device_of(logits):
        launch(
            logits, ids, normalizer, offset, slope, id_grads, out, start, width, ids.shape[1],
            SCALE=scale, BLOCK=_BLOCK,
        )  # fmt: skip
