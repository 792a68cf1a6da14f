# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sampling parameters of a request, and the sampler over a batch of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

_BLOCK_TOKENS = 256


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``sampling_params`` of a request.

    With a temperature below 1e-6, sampling is greedy, and logprobs are those of temperature 1. A
    ``top_k`` below 1 is off. A seed makes the tokens independent of other requests.
    """

    max_new_tokens: Annotated[int, Meta(ge=0)] = 128
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: Annotated[int, Meta(ge=0, lt=2**62)] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6

    @property
    def is_filtered(self) -> bool:
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a batch's rows, as tensors. A parameter that no row needs is ``None``.

    ``temperature`` is [rows, 1] float32, 1 for greedy rows, and ``greedy`` [rows] bool. ``filters`` holds
    the indices of rows with top-k or top-p, [filtered], and these rows' top-k (inf is off) and top-p, both
    [filtered, 1]. ``seeded`` holds the rows with a seed, and their generators.
    """

    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    seeded: list[tuple[int, torch.Generator]] = field(default_factory=list)

    @staticmethod
    def columns(params: list[SamplingParams]) -> list[list[float]]:
        """Returns lists of numbers, which the caller uploads as float64 and passes to :meth:`from_columns`."""
        filtered = [(i, p) for i, p in enumerate(params) if p.is_filtered]
        return [
            [1.0 if p.is_greedy else p.temperature for p in params],
            [p.is_greedy for p in params],
            [i for i, _ in filtered],
            [p.top_k if p.top_k > 0 else float("inf") for _, p in filtered],
            [p.top_p for _, p in filtered],
        ]

    @classmethod
    def from_columns(
        cls,
        columns: Sequence[torch.Tensor],
        params: list[SamplingParams],
        generators: list[torch.Generator | None],
    ) -> "SamplingBatch":
        temperature, greedy, rows, top_k, top_p = columns
        is_plain = all(p.is_greedy or p.temperature == 1.0 for p in params)
        filters = None
        if len(rows):
            filters = rows.long(), top_k.unsqueeze(1), top_p.float().unsqueeze(1)
        return cls(
            temperature=None if is_plain else temperature.float().unsqueeze(1),
            greedy=greedy.bool() if any(p.is_greedy for p in params) else None,
            filters=filters,
            seeded=[(i, g) for i, g in enumerate(generators) if g is not None],
        )


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    generator: torch.Generator,
    excluded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token for each row of the logits, [rows, vocab] of any float dtype.

    ``generator`` serves rows without a seed; ``excluded``, [vocab] bool, is never sampled. Returns
    ids [rows] long, and their logprobs [rows] float32 after temperature. The logprobs are not
    renormalized for ``excluded``, top-p and top-k, because the trainer does not do so either.
    """
    logits = logits.float()
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    allowed = logprobs if excluded is None else logprobs.masked_fill(excluded, float("-inf"))
    candidates = allowed if batch.filters is None else _filtered(allowed, *batch.filters)
    if excluded is not None:  # all others may be so much less likely that their exp() is 0
        candidates = candidates - candidates.amax(dim=-1, keepdim=True)
    ids = _draw(candidates.exp(), _uniform(batch, len(logits), logits.device, generator))
    if batch.greedy is not None:
        ids = torch.where(batch.greedy, allowed.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _uniform(
    batch: SamplingBatch, num_rows: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Returns one random number in [0, 1) for each row, [rows, 1] float64."""
    options = {"dtype": torch.float64, "device": device}
    uniform = torch.rand(num_rows, 1, generator=generator, **options)
    for row, own_generator in batch.seeded:
        uniform[row] = torch.rand(1, generator=own_generator, **options)
    return uniform


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws a token of each row by inverse transform sampling, from one number in [0, 1) for each row.

    The weights are [rows, vocab] and need not sum to 1. First a block of tokens is found, and then
    the token in it, so that only sums of blocks are added in float64. One random number for each
    row is much cheaper on a CPU than one for each logit. A token of weight 0 is never returned.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // _BLOCK_TOKENS)
    blocks = torch.nn.functional.pad(weights, (0, num_blocks * _BLOCK_TOKENS - vocab_size))
    blocks = blocks.view(num_rows, num_blocks, _BLOCK_TOKENS)
    up_to = blocks.sum(dim=-1).double().cumsum(dim=-1)
    block, target = _passed(up_to, uniform * up_to[:, -1:])
    before = torch.where(block > 0, up_to.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = blocks[torch.arange(num_rows, device=weights.device), block.squeeze(1)]
    token, _ = _passed(within.double().cumsum(dim=-1), target - before)
    # Rows of NaN lead past the vocabulary. The engine then finds that their logprobs are not finite.
    return (block * _BLOCK_TOKENS + token).squeeze(1).clamp(max=vocab_size - 1)


def _passed(up_to: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first position in each row at which the running sum is above the row's target.

    Also returns the targets, clamped to the range of the sums.
    """
    # Rounding may bring a target out of the range of the sums.
    below_total = torch.nextafter(up_to[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target.clamp(min=0.0), below_total)
    found = torch.searchsorted(up_to, target, right=True)
    return found.clamp(max=up_to.shape[1] - 1), target  # NaN is above everything


def _filtered(
    logprobs: torch.Tensor, rows: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    ordered, order = logprobs[rows].sort(dim=-1, descending=True)
    probs = ordered.exp()
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    forbidden = rank >= top_k
    # A token is kept if the more likely ones have less than top_p together, as for the first.
    forbidden |= (probs.cumsum(-1) - probs) >= top_p
    forbidden[:, 0] = False
    ordered = ordered.masked_fill(forbidden, float("-inf"))
    result = logprobs.clone()
    result[rows] = torch.empty_like(ordered).scatter_(-1, order, ordered)
    return result
