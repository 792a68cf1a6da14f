# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns sampled tokens into scored rollouts."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from torchtitan.grpo.rewards.reward_loading import JUDGE, NAMES, short_names
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rewards.scoring_worker import Scored
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import Generation, Prompt, Rollout, without_contexts

_MAX_CHARACTERS = 2000


class Scorer:
    """Decodes and scores the completions of one prompt at a time.

    ``functions`` and ``acceptor`` (``rollout.should_accept``) must be among the functions of ``pool``.
    If ``weights`` is empty, all are 1. ``names`` maps functions to the names of reward components.
    """

    unscorable_value: float | None = None

    def __init__(
        self,
        pool: RewardPool,
        codec: TextCodec,
        functions: Sequence[str],
        weights: Sequence[float],
        acceptor: str | None = None,
        *,
        names: Mapping[str, str] | None = None,
        has_environment: bool = False,
        unscorable_value: float | None = None,
    ) -> None:
        if weights and len(weights) != len(functions):
            raise ValueError(
                f"reward.weights must have one entry for each of the {len(functions)} "
                f"reward.functions, got {len(weights)} entries."
            )
        self._pool = pool
        self._codec = codec
        names = names or dict(zip(functions, short_names(functions), strict=True))
        self._names = [names[function] for function in functions]
        self._positions = [pool.functions.index(function) for function in functions]
        self._weights = list(weights) or [1.0] * len(functions)
        self._acceptor = pool.functions.index(acceptor) if acceptor is not None else None
        self._has_environment = has_environment
        self._functions, self.unscorable_value = list(functions), unscorable_value
        self._told = set[str]()

    async def score(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        """Returns one rollout per generation.

        A rollout's reward is ``None`` if a function of nonzero weight gave ``None`` for it. But a user's
        function that gives ``None`` for all of two or more rollouts does not apply to the prompt, and is
        ignored. Without reward functions, in a run that learns only from a teacher, each reward is 0.
        Raises :class:`ScoringFailed`, or :class:`RewardError` if the run must stop.
        """
        ids = [read_ids(generation) for generation in generations]
        texts = await decode_all(self._codec, ids)
        columns = environment_columns(generations) if self._has_environment else None
        scored = Scored([], {}, {})
        if self._names:
            scored = await self._pool.score(prompt, texts, ids, self._positions, columns)
        return self._rollouts(prompt, generations, texts, scored)

    async def unscorable(self, prompt: Prompt, written: Sequence[Generation]) -> list[Rollout]:
        """Returns rollouts for episodes that failed because of the policy. Calls no reward function."""
        texts = await decode_all(self._codec, [read_ids(one) for one in written])
        nothing = Scored([], {}, {}, unscorable=list(range(len(written))))
        return self._rollouts(prompt, written, texts, nothing)

    def silent(self, rollouts: Sequence[Rollout]) -> str:
        """Returns the names of functions that gave no number for at least one rollout without a reward."""
        given = [rollout.reward_components for rollout in rollouts if rollout.reward is None]
        return ", ".join(name for name in self._names if any(name not in of for of in given))

    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts that ``rollout.should_accept`` keeps, by default all. Raises like `score`."""
        if self._acceptor is None:
            return list(rollouts)
        texts = [rollout.completion for rollout in rollouts]
        ids = [rollout.token_ids.tolist() for rollout in rollouts]
        rewards = {"rewards": [rollout.reward for rollout in rollouts]}
        scored = await self._pool.score(prompt, texts, ids, [self._acceptor], rewards)
        (verdicts,) = scored.values
        return [r for r, verdict in zip(rollouts, verdicts, strict=True) if verdict]

    def describe(self) -> str:
        """Describes the groups that wait to be scored again. An empty string if there are none."""
        return self._pool.describe()

    def _rollouts(
        self, prompt: Prompt, written: Sequence[Generation], texts: Sequence[str], scored: Scored
    ) -> list[Rollout]:
        every = list(zip(self._functions, self._weights, scored.values, strict=False))
        own = [(f, w, of) for f, w, of in every if f in NAMES or not w or self._applies(f, of)]
        rollouts = []
        for i, (generation, text) in enumerate(zip(written, texts, strict=True)):
            values = zip(self._names, (of[i] for of in scored.values), strict=False)
            reward = weighted_sum([of[i] for _, _, of in own], [w for _, w, _ in own])
            cause = "" if reward is not None or not self._names else "function"
            if cause and i in scored.unscorable:
                reward, cause = self.unscorable_value, "policy"
            elif cause and [f for f, w, of in own if w and of[i] is None] == [JUDGE]:
                cause = "service"
            rollout = Rollout(
                **vars(generation), prompt_ids=prompt.token_ids, completion=text,
                reward=reward if self._names else 0.0, unscored=cause,
                reward_components={name: value for name, value in values if value is not None},
                reward_metrics=scored.metrics,
                logged=brief_columns({name: of[i] for name, of in scored.extra.items()}),
            )  # fmt: skip
            rollouts.append(rollout)
        return rollouts

    def _applies(self, function: str, values: Sequence[float | None]) -> bool:
        """Whether a function with these values applies to the prompt: not if all, at least two, are None."""
        applies = len(values) < 2 or any(value is not None for value in values)
        if not applies and function not in self._told:
            self._told.add(function)
            logger.warning(
                f"{function} (reward.functions) gave None for all {len(values)} completions of a prompt, so it "
                "does not apply there. If it fails instead, let it raise an error. This is said once."
            )
        return applies


def read_ids(generation: Generation) -> list[int]:
    """Returns the tokens for reward functions: each turn once, even if later rows repeat it as context."""
    return without_contexts(generation.token_ids, generation.new_rows).tolist()


async def decode_all(codec: TextCodec, ids: Sequence[list[int]]) -> list[str]:
    # In a thread: long completions take milliseconds to decode, without holding the GIL.
    return await asyncio.to_thread(lambda: [codec.decode(each) for each in ids])


def environment_columns(generations: Sequence[Generation]) -> dict[str, list[float | None]]:
    """The columns that reward functions receive about the environment."""
    return {"environment_reward": [generation.environment_reward for generation in generations]}


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Returns the weighted sum, or ``None`` if all values, or any with nonzero weight, are ``None``."""
    terms = [w * v for v, w in zip(values, weights, strict=True) if v is not None]
    is_whole = all(v is not None or w == 0 for v, w in zip(values, weights, strict=True))
    return sum(terms) if terms and is_whole else None


def prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as text for logs, with each chat message on a new line."""
    if isinstance(prompt.text, str):
        return prompt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)


def brief_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Shortens values for logs. Cuts long ones, and converts objects that are no JSON to text."""
    return {name: _brief(value) for name, value in columns.items()}


def _brief(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _cut(value)
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return _cut(repr(value))
    text = encoded.decode()
    return msgspec.json.decode(encoded) if len(text) <= _MAX_CHARACTERS else _cut(text)


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({len(text) - _MAX_CHARACTERS} more characters)"
