# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion in the making."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.grpo.inference.embedded.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """A request as the engine sees it.

    The engine's thread writes it; its lists of tokens only ever grow, so another thread may
    read the first ``num_tokens`` entries that it was told of.

    WAITING (``row`` is None) -> RUNNING (``row`` is its slot) -> finished
    (``finish_reason`` is set). New weights send a running request back to WAITING, to have
    its keys and values computed again.

    Attributes:
        request_id: SGLang's ``rid``.
        prompt_ids: At least one token id below the vocabulary size.
        sampling: See :class:`SamplingParams`.
        stop_ids: All tokens that end it, the model's own included.
        stream: Whether to report every token, or the end alone.
        listener: Called with ``(num_tokens, finished)``, on the server's event loop.
        segments: ``[version, start]`` of each run of tokens under one version.
        shared_prompt_tokens: Prompt tokens whose keys and values another request computed.
        logprob_start: Position from which the answer holds the prompt's logprobs, or None.
        prompt_logprobs: Of each prompt token but the first, at temperature 1; computed
            where ``logprob_start`` asks for them.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stream: bool
    listener: Callable[[int, bool], None]
    generator: torch.Generator | None = None
    row: int | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    shared_prompt_tokens: int = 0
    logprob_start: int | None = None
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion so far."""
        return self.prompt_ids + self.output_ids

    @property
    def length(self) -> int:
        """Number of tokens so far, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    def start_segment(self, version: str) -> None:
        """The tokens from here on are sampled under ``version``."""
        start = len(self.output_ids)
        # A new list: another thread may be reading the old one.
        self.segments = [*(s for s in self.segments if s[1] < start), (version, start)]

    def append(self, token_id: int, logprob: float) -> bool:
        """Takes one sampled token; returns whether it was the last."""
        if logprob != logprob:
            self.finish_reason = {
                "type": "abort",
                "message": "The model's logits are not finite. Check the weights it was given.",
            }
            return True
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token_id}
        elif len(self.output_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.sampling.max_new_tokens}
        return self.finish_reason is not None
