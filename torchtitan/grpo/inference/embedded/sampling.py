# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sampling parameters of a request, and the sampler over a batch of rows."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SamplingParams:
    """Describes how one completion is sampled.

    Attributes:
        max_new_tokens: Maximum length of the completion; 0 samples nothing.
        temperature: Below 1e-6, sampling is greedy, and logprobs are those of temperature 1.
        top_p: Nucleus bound in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; -1 is off.
        min_p: Tokens whose probability is below ``min_p`` times the highest one are excluded,
            in [0, 1].
        stop_token_ids: Tokens that end the completion, besides the model's own.
        ignore_eos: Whether the model's own end-of-sequence tokens do not end the completion.
        skip_special_tokens: Whether special tokens are left out of the answer's text.
        sampling_seed: Seed of the request's own random numbers, which do not depend on other
            requests; ``None`` uses the engine's random numbers.
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
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-6

    @property
    def is_filtered(self) -> bool:
        """Whether top-p, top-k or min-p may exclude tokens."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0)

    def validate(self) -> None:
        """Raises ValueError that names the first field out of range."""
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
    """The sampling parameters of a batch's rows, as tensors.

    Attributes:
        temperature: [rows, 1] float32, 1 for greedy rows; ``None`` if all entries are 1.
        greedy: [rows] bool; ``None`` if no row is greedy.
        filtered: Rows with top-p, top-k or min-p, and their parameters.
        seeded: Rows with random numbers of their own, and their generators.
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
        """Builds the batch from lists with one entry for each row."""
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
    logits: torch.Tensor,
    batch: SamplingBatch,
    generator: torch.Generator,
    excluded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token for each row.

    Args:
        logits: [rows, vocab], any float dtype.
        batch: Parameters of the rows.
        generator: Random numbers of the rows without a seed of their own.
        excluded: [vocab] bool, True for tokens that are never sampled; ``None`` excludes none.

    Returns:
        Token ids [rows] long, and their logprobs [rows] float32. Logprobs are those after the
        temperature, as the trainer computes them: not renormalized over the tokens that are not
        excluded, and that top-p, top-k and min-p keep.
    """
    logits = logits.float()
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # The argmax of logprob plus Gumbel noise is a sample of softmax(logprob).
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    for row, own_generator in batch.seeded:
        noise[row].exponential_(generator=own_generator)
    # Noise of exactly 0 would select its token whatever the probability.
    noise = noise.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_()
    allowed = logprobs if excluded is None else logprobs.masked_fill(excluded, float("-inf"))
    candidates = _filtered(allowed, batch.filtered) if batch.filtered else allowed
    ids = (candidates + noise).argmax(dim=-1)
    if batch.greedy is not None:
        ids = torch.where(batch.greedy, allowed.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _filtered(logprobs: torch.Tensor, filtered: list[tuple[int, SamplingParams]]) -> torch.Tensor:
    """Returns ``logprobs`` with -inf for the tokens that a row's filters exclude."""
    rows = torch.tensor([row for row, _ in filtered], device=logprobs.device)
    params = [p for _, p in filtered]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device).unsqueeze(1)

    ordered, order = logprobs[rows].sort(dim=-1, descending=True)
    probs = ordered.exp()
    vocab = logprobs.shape[-1]
    rank = torch.arange(vocab, device=logprobs.device)
    forbidden = rank >= column([p.top_k if p.top_k > 0 else vocab for p in params])
    # A token is kept if the more likely ones have less than top_p together, as for the first.
    forbidden |= (probs.cumsum(-1) - probs) >= column([p.top_p for p in params])
    forbidden |= probs < probs[:, :1] * column([p.min_p for p in params])
    forbidden[:, 0] = False
    ordered = ordered.masked_fill(forbidden, float("-inf"))
    result = logprobs.clone()
    result[rows] = torch.empty_like(ordered).scatter_(-1, order, ordered)
    return result
