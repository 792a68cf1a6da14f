# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Log-probabilities of labels straight from hidden states, without the logits.

The output projection and the softmax are one autograd function that goes over the
vocabulary slice by slice, all tokens at a time. The forward pass keeps running sums of
the softmax (https://arxiv.org/abs/1805.02867) and two numbers a token; the backward pass
turns each slice's logits into gradients on the spot. A slice's part of the weight gradient
is then final, so it is written once and never read back.

The memory that the backward pass needs for the weight's gradient is taken in the forward
pass, where it has no use yet, and keeps as many logits as go into it; the others are computed
again. The peak is the same, and products are spared: all with at most as many tokens as dims.
See `logit_slices` for where they lie.
"""

import torch
from torch.distributed import ProcessGroup

from torchtitan.grpo.losses.logit_slices import (
    KeptLogits,
    LogitSlices,
    accumulation_dtype,
    slice_width,
)
from torchtitan.grpo.losses.softmax_slices import LogitGrads, SoftmaxSums, row_blocks


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    keep_logits: bool = True,
    group: ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label, and entropy, under ``softmax(hidden @ weight.T / T)``.

    See :func:`packed_linear_logprobs`, whose two outputs these are.

    Returns:
        ``(logprobs, entropy)``, each [...] float32; the entropy is 0 without
        ``with_entropy``.
    """
    logprobs, entropy = packed_linear_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        keep_logits=keep_logits,
        group=group,
        vocab_start=vocab_start,
    ).unbind(-1)
    return logprobs, entropy


def packed_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    keep_logits: bool = True,
    group: ProcessGroup | None = None,
    vocab_start: int = 0,
) -> torch.Tensor:
    """Log-probability and entropy of each token as one tensor, the output of one node.

    Logits, softmax and sums are float32 (float64 for float64 inputs), whatever the inputs
    are. Tokens whose gradient is exactly 0 take no part in the backward pass.

    With ``group`` each rank holds a contiguous piece of the vocabulary, in rank order and
    of any size, 0 included. Logits stay where they are: two all-reduces of a few numbers a
    token make the result, which is equal on all ranks. Every rank must call it with the
    same tokens. The gradient of ``hidden`` is then this rank's part of a sum over the
    group, and that of ``weight`` is of the local piece.

    Args:
        hidden: [..., dim] float.
        weight: [vocab_local, dim] float.
        labels: [...] int, in the whole vocabulary. One outside of it gets -inf.
        temperature: Divides the logits, above 0.
        chunk_tokens: Bounds memory: the logits held at a time are at most as many as
            this many tokens have, at least 1. (Slices less than 128 ids wide, of many
            tokens, are not made.)
        with_entropy: Compute the entropy; on a GPU at the price of a second buffer of that
            size.
        keep_logits: Take the memory of the weight's gradient, where one is wanted, in the
            forward pass, and keep logits there. The gradients are the same either way. Not
            for several forward passes before the first backward pass: each takes that much.
        group: The ranks over which the vocabulary is sharded; None for a whole one.
        vocab_start: Id of the first row of ``weight``.

    Returns:
        [..., 2] float32: log-probability, and entropy or 0.

    Raises:
        ValueError: Shapes do not fit, or a setting is out of its range.
    """
    _check(hidden, weight, labels, temperature, chunk_tokens)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Asked here: inside of the function gradients are always off.
    keep_logits = keep_logits and torch.is_grad_enabled() and weight.requires_grad
    # The views give each input a node of its own that backward can ask the engine about.
    packed = _LinearLogprobs.apply(
        flat.view_as(flat),
        weight.view_as(weight),
        labels,
        temperature,
        chunk_tokens,
        with_entropy,
        keep_logits,
        group,
        vocab_start,
    )
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


class _LinearLogprobs(torch.autograd.Function):
    """[..., 2] from [tokens, dim] hidden states, the [vocab_local, dim] weight and [...] labels.

    One output and not two: the pipeline schedules that split the backward pass replay it
    from the outputs of this node. And no view: FSDP2 cannot hook one.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        keep_logits: bool,
        group: ProcessGroup | None,
        vocab_start: int,
    ) -> torch.Tensor:
        shape, labels = labels.shape, labels.reshape(-1)
        width = slice_width(len(hidden), len(weight), chunk_tokens)
        slices = LogitSlices(hidden, weight, temperature, width)
        memory = KeptLogits.reserve(slices) if keep_logits else None
        sums = _sum_up(slices, labels - vocab_start, with_entropy, memory)
        if group is not None:
            sums.reduce(group)
        logprobs, entropy, normaliser = sums.result()
        # Saved like any other tensor, and so dropped and made again by checkpointing.
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy, memory)
        ctx.settings = (temperature, width, with_entropy, vocab_start)
        ctx.logits_are_kept = memory is not None
        return torch.stack((logprobs.view(shape), entropy.view(shape)), dim=-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        for_hidden, for_weight = _wanted_gradients(ctx)
        hidden, weight, labels, normaliser, entropy, memory = ctx.saved_tensors
        temperature, width, with_entropy, vocab_start = ctx.settings
        # The cotangents carry the temperature's share, so that what follows need not.
        cotangents = grad.reshape(-1, 2) / temperature
        picked = (cotangents != 0).any(dim=1).nonzero().squeeze(1)
        if len(picked) == len(labels):
            picked = None

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values if picked is None else values.index_select(0, picked)

        slices = LogitSlices(pick(hidden), weight, temperature, width)
        logit_grads = LogitGrads(
            labels=pick(labels) - vocab_start,
            normaliser=pick(normaliser),
            entropy=pick(entropy),
            logprob_grad=pick(cotangents[:, 0]),
            entropy_grad=pick(cotangents[:, 1]) if with_entropy else None,
            blocks=row_blocks(len(slices.hidden), width, hidden.device),
        )
        memory = _take_memory(ctx, memory, for_weight)
        kept = None if memory is None else KeptLogits(memory, len(labels), width, slices.dtype)
        grad_hidden = _new_hidden_gradient(slices) if for_hidden else None
        grad_weight = _new_weight_gradient(slices, memory) if for_weight else None
        _add_input_gradients(slices, logit_grads, kept, picked, grad_hidden, grad_weight)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
            if picked is not None:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, picked, grad_hidden)
        return grad_hidden, grad_weight, *(None,) * 7


def _sum_up(
    slices: LogitSlices, labels: torch.Tensor, with_entropy: bool, memory: torch.Tensor | None
) -> SoftmaxSums:
    """The forward pass over all slices; leaves logits in ``memory``, if there is any."""
    tokens, width = len(labels), slices.width
    kept = None if memory is None else KeptLogits(memory, tokens, width, slices.dtype)
    blocks, buffer = row_blocks(tokens, width, labels.device), slices.buffer()
    # A single block has no other slice beside it in the buffer, and is changed in place.
    scratch = buffer if len(blocks) < 2 else torch.empty_like(buffer[: blocks[0].stop * width])
    sums = SoftmaxSums(labels, slices.dtype, with_entropy, blocks, scratch)
    for start in slices.starts():
        logits = kept.find(start) if kept is not None else None
        if logits is None:
            logits = slices.part_of(buffer, start)
        slices.compute(start, logits)
        sums.add(start, logits)
    return sums


def _wanted_gradients(ctx) -> tuple[bool, bool]:
    """Which of hidden and weight this backward pass is for.

    Zero-bubble schedules run it twice, for the stage's inputs and later for its weights.
    Autograd runs a Python node whole each time; asking which nodes come next spares the
    half whose result would be thrown away.
    """

    def wanted(position: int) -> bool:
        node = ctx.next_functions[position][0]
        return ctx.needs_input_grad[position] and torch._C._will_engine_execute_node(node)

    return wanted(0), wanted(1)


def _take_memory(ctx, memory: torch.Tensor | None, for_weight: bool) -> torch.Tensor | None:
    """The memory with the kept logits, or None if there are none or no longer.

    A pass for the weight puts the gradient there and gives it away. One that comes later,
    over the same graph, finds no logits and must not touch it.
    """
    if not ctx.logits_are_kept:
        return None
    ctx.logits_are_kept = not for_weight
    assert memory is not None
    # Without the version counter, by which autograd would refuse later passes.
    return memory.data


def _new_hidden_gradient(slices: LogitSlices) -> torch.Tensor:
    dtype = accumulation_dtype(slices.hidden)
    return torch.zeros_like(slices.hidden, dtype=dtype)


def _new_weight_gradient(slices: LogitSlices, memory: torch.Tensor | None) -> torch.Tensor:
    grad_weight = torch.empty_like(slices.weight) if memory is None else memory
    # Every row is written later, unless there is nothing to write.
    return grad_weight if slices.starts() else grad_weight.zero_()


def _add_input_gradients(
    slices: LogitSlices,
    logit_grads: LogitGrads,
    kept: KeptLogits | None,
    picked: torch.Tensor | None,
    grad_hidden: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
) -> None:
    """The backward pass over all slices.

    Args:
        slices: Of the tokens that have a gradient.
        logit_grads: Of the same tokens.
        kept: Logits of all tokens, for some of the slices.
        picked: Rows in ``kept`` of the tokens that have a gradient; None for all.
        grad_hidden: Added to, if wanted.
        grad_weight: Overwritten, if wanted; ``kept`` may be in its memory.
    """
    buffer = slices.buffer()
    for start in slices.starts():
        grads = slices.part_of(buffer, start)
        logits = kept.find(start) if kept is not None else None
        if logits is None:
            slices.compute(start, grads)
            logit_grads.write(start, grads, None, grads)
        else:
            logit_grads.write(start, logits, picked, grads)
        # The kept logits of this slice have been read: its rows may be written from here on.
        grads = grads.to(slices.hidden.dtype)
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
        out += torch.mm(a, b, out_dtype=out.dtype)
