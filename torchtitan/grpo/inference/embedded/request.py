# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion that the engine samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.grpo.inference.client import PromptRating
from torchtitan.grpo.inference.embedded.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """A request as the engine sees it; only the engine's thread writes to it.

    WAITING (``row`` is ``None``) -> PREFILLING (``prefilled_to`` is set) -> RUNNING (``row`` is its
    slot) -> finished (``finish_reason`` is set). A request whose prompt fits into one step is never
    PREFILLING. New weights send a request that has a row back to WAITING.

    Attributes:
        stop_ids: Tokens that end the completion, including the model's EOS tokens unless they are ignored.
        on_end: Called on the server's event loop when the request has finished.
        prefilled_to: While the prompt is computed in chunks, the number of its tokens that are
            in the slot after the current step; else ``None``.
        segments: ``(version, start)`` for each version that sampled tokens of the completion.
        shared_prompt_tokens: Prompt tokens whose keys and values another request computed.
        logprob_start: First position whose prompt logprob is returned; ``None`` for none.
        rating: Logprob of each prompt token but the first, with at least ``num_top`` most
            likely tokens, the most likely one first.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    on_end: Callable[[], None] = lambda: None
    generator: torch.Generator | None = None
    row: int | None = None
    prefilled_to: int | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    shared_prompt_tokens: int = 0
    logprob_start: int | None = None
    num_top: int = 0
    rating: PromptRating | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_cached(self) -> int:
        """Number of tokens that are in the slot after the current step."""
        return self.length if self.prefilled_to is None else self.prefilled_to

    @property
    def next_input(self) -> int:
        """Token that the current step computes in the request's row: the last one counted in ``num_cached``."""
        position = self.num_cached - 1 - len(self.prompt_ids)
        return self.output_ids[position] if position >= 0 else self.prompt_ids[position]

    def start_segment(self, version: str) -> None:
        start = len(self.output_ids)
        self.segments = [*(s for s in self.segments if s[1] < start), (version, start)]

    def append(self, token_id: int, logprob: float) -> bool:
        """Appends one sampled token, and returns whether the request has finished."""
        if logprob != logprob:
            self.finish_reason = {
                "type": "abort",
                "message": "The model's logits are not finite. Check the weights that were pushed.",
            }
            return True
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token_id}
        elif len(self.output_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.sampling.max_new_tokens}
        return self.finish_reason is not None
