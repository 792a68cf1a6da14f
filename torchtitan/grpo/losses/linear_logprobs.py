# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Log-probabilities of labels computed from hidden states, without materializing all logits.

The output projection and the softmax are one autograd function over slices of the vocabulary, all
tokens at a time. The forward pass keeps running sums of the softmax
(https://arxiv.org/abs/1805.02867) and two numbers for each token. The backward pass turns each
slice's logits into gradients in place. From these it computes the slice's part of the weight gradient,
which is written once and never read.

The forward pass allocates the weight's gradient and keeps as many logits as fit in that memory. The
backward pass computes the other logits again. This does not raise peak memory. With at most as many tokens
as hidden dims, no matrix product is repeated. `softmax_slices` shows where the logits lie.
"""

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from torchtitan.grpo.losses.softmax_passes import write_grads
from torchtitan.grpo.losses.softmax_slices import (
    KeptLogits,
    LogitSlices,
    SoftmaxSums,
    gradient_factors,
    slice_width,
)


def packed_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    trains_entropy: bool = True,
    keep_logits: bool = True,
    group: ProcessGroup | None = None,
    vocab_start: int = 0,
    other_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns log-probability and entropy of each token as one tensor, from one autograd node.

    With ``other_ids`` the same passes also pick the log-probabilities of these ids from each slice.
    Logits, softmax and sums are float32, or float64 for float64 inputs. The host does not wait for the device.

    With ``group`` each rank holds a contiguous piece of the vocabulary, in rank order and of any
    size, 0 included, and passes the same tokens. Two all-reduces of a few numbers for each token,
    not of logits, give all ranks the same result. The gradient of ``hidden`` is this rank's summand
    of a sum over the group, and that of ``weight`` is the gradient of the local piece.

    Args:
        hidden: [..., dim] float.
        weight: [vocab_local, dim] float.
        labels: [...] int, ids of the whole vocabulary. A label outside of it gets -inf.
        temperature: Divisor of the logits, above 0.
        chunk_tokens: Bounds memory; at least 1. At most as many logits exist at a time as this many
            tokens have over the whole vocabulary, except that slices are at least 128 ids wide.
        trains_entropy: Whether the entropy has a gradient; if not, one that arrives is ignored.
        keep_logits: Whether the forward pass allocates the weight's gradient, if needed, and keeps
            logits there. Gradients are the same in both cases. Unsuitable for several forward passes
            in a row, because each allocates a gradient.
        group: The ranks over which the vocabulary is sharded; None for a whole one.
        other_ids: [..., k] int, different ids of the whole vocabulary for each token; the label may
            be one of them. An id outside of the vocabulary gets -inf, and may be repeated.

    Returns [..., 2 + k] float32: log-probability of the label, entropy (0 without ``with_entropy``), and
    log-probabilities of the other ids. Raises ValueError if shapes do not match or a setting is out of range.
    """
    _check(hidden, weight, labels, temperature, chunk_tokens)
    ids = _all_ids(labels, other_ids)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Checked here, because gradients are always disabled inside of the function.
    keep_logits = keep_logits and torch.is_grad_enabled() and weight.requires_grad
    entropy = (with_entropy, with_entropy and trains_entropy)
    settings = (temperature, chunk_tokens, entropy, keep_logits, group, vocab_start)
    packed = _LinearLogprobs.apply(flat, weight, ids, *settings)
    assert isinstance(packed, torch.Tensor)
    return packed


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} without its last dim must have the shape of "
            f"labels {tuple(labels.shape)}."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [vocab, {hidden.shape[-1]}], the last dim as in hidden, got "
            f"{tuple(weight.shape)}."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}.")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")


def _all_ids(labels: torch.Tensor, other_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns the label and the other ids of each token, [..., 1 + k]."""
    if other_ids is None:
        return labels.unsqueeze(-1)
    if other_ids.shape[:-1] != labels.shape:
        raise ValueError(
            f"other_ids {tuple(other_ids.shape)} without its last dim must have the shape of "
            f"labels {tuple(labels.shape)}."
        )
    return torch.cat((labels.unsqueeze(-1), other_ids), dim=-1)


class _LinearLogprobs(torch.autograd.Function):
    """Maps [tokens, dim] hidden states, the [vocab_local, dim] weight and [..., n] ids to [..., 1 + n].

    The result holds the n log-probabilities, with the entropy after the first one. It is not a view, because
    FSDP2 cannot hook views.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_settings: tuple[bool, bool],
        keep_logits: bool,
        group: ProcessGroup | None,
        vocab_start: int,
    ) -> torch.Tensor:
        shape, ids = ids.shape, ids.reshape(-1, ids.shape[-1])
        with_entropy, trains_entropy = entropy_settings
        width = slice_width(len(hidden), len(weight), chunk_tokens)
        slices = LogitSlices(hidden, weight, width)
        kept = KeptLogits.reserve(slices) if keep_logits else None
        sums = SoftmaxSums(ids - vocab_start, slices.dtype, temperature, with_entropy)
        _sum_up(slices, sums, kept)
        if group is not None:
            sums.reduce(group)
        logprobs, entropy, normalizer = sums.result()
        memory = None if kept is None else kept.memory
        # Saved as other tensors are, so that activation checkpointing drops and recreates it.
        ctx.save_for_backward(hidden, weight, ids, normalizer, entropy, memory)
        ctx.settings = (temperature, width, trains_entropy, vocab_start)
        ctx.logits_are_kept = memory is not None
        label, others = logprobs.view(shape).tensor_split((1,), dim=-1)
        return torch.cat((label, entropy.view(*shape[:-1], 1), others), dim=-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden, weight, ids, normalizer, entropy, memory = ctx.saved_tensors
        temperature, width, trains_entropy, vocab_start = ctx.settings
        # Divided by the temperature here, so that no later step has to.
        cotangents = grad.reshape(-1, grad.shape[-1]) / temperature
        label, of_entropy, others = cotangents.tensor_split((1, 2), dim=1)
        slices = LogitSlices(hidden, weight, width)
        id_grads, ids = torch.cat((label, others), dim=1), ids - vocab_start
        entropy_grad = of_entropy[:, 0] if trains_entropy else None
        offset, slope = gradient_factors(entropy, id_grads, entropy_grad)

        def write(start: int, logits: torch.Tensor, out: torch.Tensor) -> None:
            scale = 1 / temperature
            write_grads(logits, start, ids, scale, normalizer, offset, slope, id_grads, out)

        memory = _take_memory(ctx, memory)
        kept = None if memory is None else KeptLogits(memory, slices)
        grad_hidden = grad_weight = None
        if for_hidden:
            grad_hidden = torch.zeros_like(slices.hidden, dtype=slices.dtype)
        if for_weight:
            grad_weight = torch.empty_like(weight) if memory is None else memory
            if not slices.starts():  # otherwise every row is written later
                grad_weight.zero_()
        _add_input_gradients(slices, write, kept, grad_hidden, grad_weight)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, *(None,) * 7


def _sum_up(slices: LogitSlices, sums: SoftmaxSums, kept: KeptLogits | None) -> None:
    buffer = slices.buffer(slices.dtype)
    for start in slices.starts():
        logits = kept.find(start) if kept is not None else None
        if logits is None:
            logits = slices.part_of(buffer, start)
        slices.compute(start, logits)
        sums.add(start, logits)


def _take_memory(ctx, memory: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the memory of kept logits, to write the weight's gradient into, or None if none were kept.

    A second backward pass (``retain_graph``) gets None, because the first has put the gradient there.
    """
    if not ctx.logits_are_kept:
        return None
    ctx.logits_are_kept = False
    assert memory is not None
    # ``data`` has no version counter, because of which autograd would refuse later passes.
    return memory.data


def _add_input_gradients(
    slices: LogitSlices,
    write: Callable[[int, torch.Tensor, torch.Tensor], None],
    kept: KeptLogits | None,
    grad_hidden: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
) -> None:
    """Computes the gradients of hidden states and weight. ``write`` turns a slice's logits into gradients."""
    logit_buffer = slices.buffer(slices.dtype)
    # Where the products have another dtype, the gradients are written in it right away.
    grad_buffer = logit_buffer
    if slices.hidden.dtype != slices.dtype:
        grad_buffer = slices.buffer(slices.hidden.dtype)
    for start in slices.starts():
        logits = kept.find(start) if kept is not None else None
        if logits is None:
            logits = slices.part_of(logit_buffer, start)
            slices.compute(start, logits)
        grads = slices.part_of(grad_buffer, start)
        write(start, logits, grads)
        # The kept logits of this slice have been read, so that its rows may be written now.
        if grad_weight is not None:
            _write_product(grads.t(), slices.hidden, grad_weight[start : start + slices.width])
        if grad_hidden is not None:
            _add_product(grads, slices.weight_slice(start), grad_hidden)


def _write_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
