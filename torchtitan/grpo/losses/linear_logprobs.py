# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Log-probabilities of labels straight from hidden states, without the logits.

The output projection and the softmax are one autograd function that goes over the
vocabulary slice by slice, all tokens at a time. The forward pass keeps running sums of
the softmax (https://arxiv.org/abs/1805.02867) and two numbers a token; the backward pass
computes each slice's logits again and turns them into gradients on the spot. A slice's
part of the weight gradient is then final, so it is written once and never read back.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Narrower slices make slow matrix products, and save nothing worth having.
_MIN_SLICE = 128


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
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
        with_entropy: Compute the entropy, at the price of a second buffer of that size.
        group: The ranks over which the vocabulary is sharded; None for a whole one.
        vocab_start: Id of the first row of ``weight``.

    Returns:
        [..., 2] float32: log-probability, and entropy or 0.

    Raises:
        ValueError: Shapes do not fit, or a setting is out of its range.
    """
    _check(hidden, weight, labels, temperature, chunk_tokens)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # The views give each input a node of its own that backward can ask the engine about.
    packed = _LinearLogprobs.apply(
        flat.view_as(flat),
        weight.view_as(weight),
        labels.reshape(-1),
        temperature,
        chunk_tokens,
        with_entropy,
        group,
        vocab_start,
    )
    assert isinstance(packed, torch.Tensor)
    return packed.view(*labels.shape, 2)


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
    """[tokens, 2] from [tokens, dim] hidden states and the [vocab_local, dim] weight.

    One output and not two: the pipeline schedules that split the backward pass replay it
    from the outputs of this node.
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
        group: ProcessGroup | None,
        vocab_start: int,
    ) -> torch.Tensor:
        sums = _SoftmaxSums(labels - vocab_start, _accumulation_dtype(hidden), with_entropy)
        logits = _LogitSlices(hidden, weight, temperature, chunk_tokens)
        for start, logit_slice in logits:
            sums.add(start, logit_slice)
        if group is not None:
            sums.reduce(group)
        logprobs, entropy, normaliser = sums.result()
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.settings = (temperature, chunk_tokens, with_entropy, vocab_start)
        return torch.stack((logprobs, entropy), dim=-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = _wanted_gradients(ctx)
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy, vocab_start = ctx.settings
        # The cotangents carry the temperature's share, so that what follows need not.
        cotangents = grad / temperature
        rows = (cotangents != 0).any(dim=1).nonzero().squeeze(1)
        everything = len(rows) == len(labels)

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values if everything else values.index_select(0, rows)

        slices = _LogitSlices(pick(hidden), weight, temperature, chunk_tokens)
        logit_grads = _LogitGrads(
            labels=pick(labels) - vocab_start,
            normaliser=pick(normaliser),
            entropy=pick(entropy),
            logprob_grad=pick(cotangents[:, 0]),
            entropy_grad=pick(cotangents[:, 1]) if with_entropy else None,
        )
        grad_hidden, grad_weight = _input_gradients(slices, logit_grads, *wanted)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
            if not everything:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None, None, None


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


def _accumulation_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class _LogitSlices:
    """Iterates over ``(first id, [tokens, width] tempered logits)`` of the vocabulary.

    All slices share one buffer: a slice may be changed in place, and is gone when the next
    one comes.

    Attributes:
        hidden: [tokens, dim], in the dtype of the matrix products.
        weight: [vocab_local, dim], as it was given.
        width: Ids in a slice; the last may have fewer.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, chunk_tokens: int
    ) -> None:
        self._dtype = _accumulation_dtype(hidden)
        # Tensor cores multiply half precision exactly and add in float32. A CPU rounds in
        # between or is slow at it, so there the operands are widened, the weight by slices.
        mixed = hidden.is_cuda and hidden.dtype == weight.dtype
        self.hidden = hidden if mixed else hidden.to(self._dtype)
        self.weight = weight
        self._temperature = temperature
        vocab, tokens = weight.shape[0], max(len(hidden), 1)
        self.width = min(vocab, max(_MIN_SLICE, chunk_tokens * vocab // tokens))

    def weight_slice(self, start: int) -> torch.Tensor:
        """[width, dim] in the dtype of the matrix products."""
        return self.weight[start : start + self.width].to(self.hidden.dtype)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        tokens, vocab = len(self.hidden), self.weight.shape[0]
        if not tokens or not vocab:
            return
        buffer = torch.empty(tokens * self.width, dtype=self._dtype, device=self.hidden.device)
        for start in range(0, vocab, self.width):
            weight = self.weight_slice(start)
            logits = buffer[: tokens * len(weight)].view(tokens, len(weight))
            _matmul(self.hidden, weight.t(), logits)
            if self._temperature != 1:
                logits.div_(self._temperature)
            yield start, logits


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _label_columns(
    labels: torch.Tensor, start: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 1] column of each label in a slice, and whether it is in there at all."""
    columns = (labels - start).unsqueeze(1)
    inside = (columns >= 0) & (columns < width)
    return columns.clamp(0, width - 1), inside


class _SoftmaxSums:
    """Running maximum and sums of the softmax over slices, then over ranks.

    With ``x`` the logits less the maximum so far, the sums are of ``exp(x)`` and, for the
    entropy, ``x * exp(x)``. They are rescaled when the maximum rises.
    """

    def __init__(self, labels: torch.Tensor, dtype: torch.dtype, with_entropy: bool) -> None:
        def full(value: float) -> torch.Tensor:
            return torch.full(labels.shape, value, dtype=dtype, device=labels.device)

        self._labels = labels
        self._with_entropy = with_entropy
        # Finite, so that a rank without any ids brings no inf - inf.
        self._maximum = full(torch.finfo(dtype).min)
        self._label_logits = full(-torch.inf)
        self._exp_sum = full(0.0)
        self._weighted_sum = full(0.0)

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Takes in one slice, [tokens, width], and overwrites it."""
        columns, inside = _label_columns(self._labels, start, logits.shape[1])
        found = logits.gather(1, columns)
        self._label_logits = torch.where(inside, found, self._label_logits[:, None])[:, 0]
        self._raise_maximum(torch.maximum(self._maximum, logits.amax(dim=1)))
        logits.sub_(self._maximum[:, None])
        if self._with_entropy:
            exponentials = logits.exp()
            self._weighted_sum += logits.mul_(exponentials).sum(dim=1)
        else:
            exponentials = logits.exp_()
        self._exp_sum += exponentials.sum(dim=1)

    def reduce(self, group: ProcessGroup) -> None:
        """Combines the ranks' pieces of the vocabulary."""
        maxima = torch.stack((self._maximum, self._label_logits))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        self._raise_maximum(maxima[0])
        self._label_logits = maxima[1]
        sums = torch.stack((self._exp_sum, self._weighted_sum))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        self._exp_sum, self._weighted_sum = sums.unbind()

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens] log-probabilities, entropies (or 0) and logarithms of the normaliser."""
        log_sum = self._exp_sum.log()
        logprobs = (self._label_logits - self._maximum) - log_sum
        entropy = torch.zeros_like(log_sum)
        if self._with_entropy:
            entropy = log_sum - self._weighted_sum / self._exp_sum
        return logprobs, entropy, self._maximum + log_sum

    def _raise_maximum(self, maximum: torch.Tensor) -> None:
        change = self._maximum - maximum
        scale = change.exp()
        if self._with_entropy:
            self._weighted_sum = (self._weighted_sum + self._exp_sum * change) * scale
        self._exp_sum = self._exp_sum * scale
        self._maximum = maximum


class _LogitGrads:
    """Turns a slice of logits into the gradient with respect to it, in place.

    With ``p`` the softmax, ``H`` its entropy, ``y`` the label, ``g`` and ``h`` the
    gradients of log-probability and entropy::

        d log p[y] / d z[v] = 1[v = y] - p[v]
        d H / d z[v]        = -p[v] (log p[v] + H)
        gradient of z[v]    = g 1[v = y] - p[v] (h log p[v] + h H + g)
    """

    def __init__(
        self,
        labels: torch.Tensor,
        normaliser: torch.Tensor,
        entropy: torch.Tensor,
        logprob_grad: torch.Tensor,
        entropy_grad: torch.Tensor | None,
    ) -> None:
        self._labels = labels
        self._normaliser = normaliser[:, None]
        self._at_label = logprob_grad[:, None]
        self._slope: torch.Tensor | None = None
        self._offset = -self._at_label
        # An entropy that was only logged asks for no gradient, and not for a second buffer.
        if entropy_grad is not None and bool((entropy_grad != 0).any()):
            self._slope = -entropy_grad[:, None]
            self._offset = self._offset + self._slope * entropy[:, None]

    def of(self, start: int, logits: torch.Tensor) -> torch.Tensor:
        """[tokens, width] gradient; takes the place of ``logits``."""
        log_p = logits.sub_(self._normaliser)
        if self._slope is None:
            grads = log_p.exp_().mul_(self._offset)
        else:
            factors = torch.addcmul(self._offset, log_p, self._slope)
            grads = log_p.exp_().mul_(factors)
        columns, inside = _label_columns(self._labels, start, grads.shape[1])
        at_label = grads.gather(1, columns) + torch.where(inside, self._at_label, 0.0)
        return grads.scatter_(1, columns, at_label)


def _input_gradients(
    slices: _LogitSlices, logit_grads: _LogitGrads, for_hidden: bool, for_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the hidden states that ``slices`` has, and of the whole local weight."""
    hidden, weight = slices.hidden, slices.weight
    grad_hidden = grad_weight = None
    if for_hidden:
        grad_hidden = torch.zeros_like(hidden, dtype=_accumulation_dtype(hidden))
    if for_weight:
        # Every row is written below, unless there is nothing to write.
        grad_weight = torch.empty_like(weight) if len(hidden) else torch.zeros_like(weight)
    for start, logits in slices:
        grads = logit_grads.of(start, logits).to(hidden.dtype)
        if grad_weight is not None:
            rows = grad_weight[start : start + grads.shape[1]]
            if rows.dtype == grads.dtype:
                torch.mm(grads.t(), hidden, out=rows)
            else:
                rows.copy_(grads.t() @ hidden)
        if grad_hidden is not None:
            part = slices.weight_slice(start)
            if grads.dtype == grad_hidden.dtype:
                torch.addmm(grad_hidden, grads, part, out=grad_hidden)
            else:
                grad_hidden += torch.mm(grads, part, out_dtype=grad_hidden.dtype)
    return grad_hidden, grad_weight
