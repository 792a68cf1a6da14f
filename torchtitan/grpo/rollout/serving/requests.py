# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the requests to servers, and decides which answers can be trained on."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.inference.client import LogprobsError, ServerError
from torchtitan.grpo.rollout.completion_checks import completion_problem
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt


@dataclass(frozen=True)
class Sampling:
    """Settings of requests, lengths in tokens. With a seed, sampled tokens do not depend on other requests."""

    max_new_tokens: int
    max_total_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False
    seed: int | None = None
    unknown_ids: tuple[int, ...] = ()

    @classmethod
    def of_rollouts(cls, config: RolloutProcessConfig) -> "Sampling":
        rollout = config.rollout
        return cls(
            max_new_tokens=rollout.max_new_tokens,
            max_total_tokens=config.seq_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            # Explicit stop tokens end a completion even if EOS is ignored.
            stop_token_ids=(
                *(() if rollout.ignore_eos else config.eos_token_ids),
                *rollout.stop_token_ids,
            ),
            ignore_eos=rollout.ignore_eos,
            seed=config.seed if rollout.deterministic else None,
        )

    @classmethod
    def of_evaluation(cls, config: RolloutProcessConfig, settings: EvaluationSet) -> "Sampling":
        of_rollouts = cls.of_rollouts(config)
        return replace(
            of_rollouts,
            max_new_tokens=settings.max_new_tokens or of_rollouts.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            # Greedy decoding draws nothing.
            seed=of_rollouts.seed if settings.temperature > 0 else None,
        )

    def of_sample(self, prompt: Prompt, sample: int, *place: int) -> "Sampling":
        """Returns the settings with a request's own seed; ``place`` is unique among the sample's requests."""
        if self.seed is None:
            return self
        text = " ".join(map(str, (self.seed, prompt.group_id, sample, *place)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # The seed has 31 bits, because every kind of server accepts such a seed.
        return replace(self, seed=int.from_bytes(digest, "big") >> 33)

    def room_after(self, prompt: Prompt) -> int:
        return min(self.max_new_tokens, self.max_total_tokens - len(prompt.token_ids))

    def request(self, request_id: str, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt.token_ids.tolist(),
            max_new_tokens=self.room_after(prompt),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            unknown_ids=self.unknown_ids,
        )


def unknown_ids_in(generation: Generation, request: GenerateRequest) -> np.ndarray:
    return generation.token_ids[np.isin(generation.token_ids, request.unknown_ids)]


def as_segment(generation: Generation, request: GenerateRequest) -> Generation:
    """Returns an aborted answer as a finished segment, so that another request can continue the completion.

    The answer may end with a stop token: SGLang computes one more token for a request that is aborted.
    """
    is_last = generation.token_ids[-1] in request.stop_token_ids
    return replace(generation, finish_reason="stop" if is_last else "length")


def check_generation(
    generation: Generation, request: GenerateRequest, vocab_size: int, url: str
) -> None:
    """Raises :class:`ServerError` if an answer cannot be trained on."""
    num_tokens = len(generation.token_ids)
    if generation.finish_reason == "abort":
        problem = f"it was aborted after {num_tokens} tokens"
    elif not 0 < num_tokens <= request.max_new_tokens:
        problem = f"it has {num_tokens} tokens, expected 1 to {request.max_new_tokens}"
    elif (unknown := unknown_ids_in(generation, request)).size:
        problem = (
            f"{unknown.size} of its {num_tokens} tokens, such as {unknown[0]}, are not in the tokenizer, "
            "so its text would lack them. If it happens often, train a model whose vocab_size fits "
            "its tokenizer, or see docs/servers.md"
        )
    else:
        problem = completion_problem(generation, vocab_size)
    if problem is not None:
        kind = LogprobsError if "logprobs" in problem else ServerError
        raise kind(f"{url} returned a completion that cannot be used: {problem}.")
