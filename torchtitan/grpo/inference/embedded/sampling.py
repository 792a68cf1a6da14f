# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sampling parameters of a request, and the sampler over a batch of rows."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled.

    Attributes:
        max_new_tokens: Upper bound of the completion's length; 0 writes nothing.
        temperature: 0 (below 1e-6) is greedy; logprobs are then those of temperature 1.
        top_p: Nucleus bound in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; -1 is off.
        min_p: Tokens less likely than this times the likeliest are left out, in [0, 1].
        stop_token_ids: Tokens that end the completion, besides the model's own.
        ignore_eos: The model's own end-of-sequence tokens do not end the completion.
        skip_special_tokens: Leave special tokens out of the answer's text.
        sampling_seed: Makes the request's random numbers its own, whatever runs beside it.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < 1e-6

    @property
    def is_filtered(self) -> bool:
        """Whether top-p, top-k or min-p leave anything out."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0)

    def validate(self) -> None:
        """Raises ValueError naming the first field out of range."""
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature <= 1e6, "in [0, 1e6]"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or 1 <= self.top_k < 2**31, "-1 (off) or at least 1"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("sampling_seed", 0 <= (self.sampling_seed or 0) < 2**62, "in [0, 2**62)"),
        )
        for name, holds, rule in checks:
            if not holds:
                raise ValueError(
                    f"sampling_params.{name} must be {rule}, got {getattr(self, name)}."
                )


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a batch's rows as tensors; rebuilt when rows change.

    Attributes:
        temperature: [rows, 1] float32, 1 for greedy rows; None where all are 1.
        greedy: [rows] bool; None where no row is greedy.
        filtered: Rows that top-p, top-k or min-p apply to, with their parameters.
        seeded: Rows with random numbers of their own.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    filtered: list[tuple[int, SamplingParams]] = field(default_factory=list)
    seeded: list[tuple[int, torch.Generator]] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        params: list[SamplingParams],
        generators: list[torch.Generator | None],
        device: torch.device,
    ) -> "SamplingBatch":
        """One entry of each list a row."""
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        greedy = [p.is_greedy for p in params]
        return cls(
            temperature=None
            if all(t == 1.0 for t in temperatures)
            else torch.tensor(temperatures, device=device).unsqueeze(1),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            filtered=[(i, p) for i, p in enumerate(params) if p.is_filtered],
            seeded=[(i, g) for i, g in enumerate(generators) if g is not None],
        )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row.

    Args:
        logits: [rows, vocab], any float dtype.
        batch: The rows' parameters.
        generator: Random numbers of the rows without a seed of their own.

    Returns:
        Token ids [rows] long, and their logprobs [rows] float32: after the temperature,
        not renormalised for what top-p, top-k and min-p leave out.
    """
    logits = logits.float()
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # The argmax of logprob plus Gumbel noise is a sample of softmax(logprob).
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    for row, own_generator in batch.seeded:
        noise[row].exponential_(generator=own_generator)
    # A noise of exactly 0 would win whatever the token's probability.
    noise = noise.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_()
    candidates = _filtered(logprobs, batch.filtered) if batch.filtered else logprobs
    ids = (candidates + noise).argmax(dim=-1)
    if batch.greedy is not None:
        ids = torch.where(batch.greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _filtered(logprobs: torch.Tensor, filtered: list[tuple[int, SamplingParams]]) -> torch.Tensor:
    """Copies ``logprobs`` with -inf where a row's top-k, top-p or min-p forbid a token."""
    rows = torch.tensor([row for row, _ in filtered], device=logprobs.device)
    params = [p for _, p in filtered]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device).unsqueeze(1)

    ordered, order = logprobs[rows].sort(dim=-1, descending=True)
    probs = ordered.exp()
    vocab = logprobs.shape[-1]
    rank = torch.arange(vocab, device=logprobs.device)
    forbidden = rank >= column([p.top_k if p.top_k > 0 else vocab for p in params])
    # A token stays while the ones before it hold less than top_p: the first always does.
    forbidden |= (probs.cumsum(-1) - probs) >= column([p.top_p for p in params])
    forbidden |= probs < probs[:, :1] * column([p.min_p for p in params])
    forbidden[:, 0] = False
    ordered = ordered.masked_fill(forbidden, float("-inf"))
    result = logprobs.clone()
    result[rows] = torch.empty_like(ordered).scatter_(-1, order, ordered)
    return result
