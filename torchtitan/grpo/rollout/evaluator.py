# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluates held-out prompts on the servers that also generate the rollouts."""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentFailed
from torchtitan.grpo.rollout.results import (
    EvaluatedCompletion,
    EvaluatedPrompt,
    EvaluationResult,
    SetResult,
)
from torchtitan.grpo.rollout.scoring import decode_all, environment_columns, prompt_text, read_ids
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import CompletionWriter
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import Generation, Prompt, separated

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_PASS_SCORE, NUM_KEPT_SAMPLES = 1.0, 8

_Scoring = asyncio.Task[EvaluatedPrompt | None]


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts that was loaded. ``function`` indexes the reward functions of the pool."""

    name: str
    settings: EvaluationSet
    prompts: Sequence[Prompt]
    function: int
    writer: CompletionWriter


class Evaluator:
    """Runs one evaluation at a time. The writers of the sets must submit their requests to ``room``."""

    def __init__(
        self,
        sets: Sequence[HeldOut],
        dispatcher: Dispatcher,
        room: SpareSlots,
        pool: RewardPool,
        codec: TextCodec,
        drops: DropLog | None = None,
    ) -> None:
        self._sets, self._dispatcher, self._room = sets, dispatcher, room
        self._pool, self._codec, self._drops = pool, codec, drops or DropLog()
        self._has_changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._num_done = self._num_tokens = 0
        dispatcher.listeners.append(self._has_changed.set)

    async def evaluate(self, version: int, pinned: Collection[str] = ()) -> EvaluationResult:
        """Evaluates with servers that serve ``version`` or a newer one, and waits for these if necessary.

        Only the servers with the URLs ``pinned`` generate, as long as one of them is part of the run. A
        completion is left out, with a warning, if generation or scoring failed or if its score
        is ``None``. Raises ``RuntimeError`` if no completion of a set received a score.
        """
        async with self._turn:
            started, self._num_done = time.monotonic(), 0
            self._pool.next_step = lambda: max(version, 0)
            self._room.pin(pinned)
            # In a task group, a failed completion also interrupts the loop that starts the others.
            async with asyncio.TaskGroup() as group:
                of_sets = [await self._start_set(held, version, group) for held in self._sets]
            scored = [[task.result() for task in tasks] for tasks in of_sets]
            spans.add("evaluation", "evaluate", started, time.monotonic(), version=version)
        return self._result(
            [[prompt for prompt in of_set if prompt is not None] for of_set in scored],
            time.monotonic() - started,
        )

    def progress(self) -> tuple[int, int, int]:
        """The numbers of finished completions, of completions wanted, and of all tokens so far."""
        wanted = sum(len(held.prompts) * held.settings.num_samples for held in self._sets)
        return self._num_done, wanted, self._num_tokens

    def describe(self) -> str:
        versions = {url: server.version for url, server in self._dispatcher.servers.items()}
        return (
            f"evaluation: {self._dispatcher.in_flight_evaluation} completions in flight; "
            f"served: {versions}"
        )

    async def _start_set(
        self, held: HeldOut, version: int, group: asyncio.TaskGroup
    ) -> list[_Scoring]:
        return [
            group.create_task(
                self._score(held, prompt, await self._start_prompt(held, prompt, version))
            )
            for prompt in held.prompts
        ]

    async def _start_prompt(
        self, held: HeldOut, prompt: Prompt, version: int
    ) -> list[asyncio.Task[Generation]]:
        started: list[asyncio.Task[Generation]] = []
        try:
            for sample in range(held.settings.num_samples):
                server = await self._wait_for_server(version)
                started.append(held.writer.start(prompt, server, sample=sample).task)
        except BaseException:  # nobody else knows of them yet
            for task in started:
                task.cancel()
            raise
        return started

    async def _wait_for_server(self, version: int) -> Server:
        while True:
            self._has_changed.clear()
            server = self._room.choose(lambda served: served >= version)
            if server is not None:
                return server
            await wait_at_most(_RETRY_SECONDS, self._has_changed)

    async def _score(
        self, held: HeldOut, prompt: Prompt, completions: Sequence[asyncio.Task[Generation]]
    ) -> EvaluatedPrompt | None:
        """Returns the prompt with its scored completions, or ``None`` if no completion received a score."""
        generations = separated(await self._finished(held, prompt, completions))
        if not generations:
            return None
        ids = [read_ids(generation) for generation in generations]
        texts = await decode_all(self._codec, ids)
        columns = environment_columns(generations) if held.writer.has_environment else None
        try:
            scored = await self._pool.score(prompt, texts, ids, [held.function], columns)
        except ScoringFailed as error:
            self._drop(held, prompt, str(error), number=len(generations))
            return None
        (scores,) = scored.values
        if num_unscored := sum(score is None for score in scores):
            reason = f"{held.settings.function} gives a completion no score (None)."
            self._drop(held, prompt, reason, number=num_unscored)
        evaluated = tuple(
            _evaluated(text, score, generation)
            for text, score, generation in zip(texts, scores, generations, strict=True)
            if score is not None
        )
        if not evaluated:
            return None
        return EvaluatedPrompt(prompt.group_id, prompt_text(prompt), evaluated)

    async def _finished(
        self, held: HeldOut, prompt: Prompt, completions: Sequence[asyncio.Task[Generation]]
    ) -> list[Generation]:
        found = []
        try:
            for completion in completions:
                try:
                    found.append(await completion)
                    self._num_tokens += len(found[-1].token_ids)
                except (ServerError, EnvironmentFailed) as error:
                    self._drop(held, prompt, str(error))
                self._num_done += 1
        except BaseException:
            for completion in completions:
                completion.cancel()
            raise
        return found

    def _drop(self, held: HeldOut, prompt: Prompt, reason: str, number: int = 1) -> None:
        where = f"prompt {prompt.group_id} of {held.settings.path}"
        self._drops.record("held-out prompt", f"{where}: {reason}", number=number)

    def _result(self, of_sets: Sequence[list[EvaluatedPrompt]], seconds: float) -> EvaluationResult:
        for held, prompts in zip(self._sets, of_sets, strict=True):
            num_wanted = len(held.prompts) * held.settings.num_samples
            num_scored = sum(len(prompt.completions) for prompt in prompts)
            if num_scored == 0:
                raise RuntimeError(
                    f"None of the {num_wanted} completions of held-out prompts ({held.name}, "
                    f"{held.settings.path}) could be scored. Last server error: "
                    f"{self._dispatcher.attempts.last_error or 'none'}."
                )
            if num_scored < num_wanted:
                logger.warning(
                    "%d completions of held-out prompts (%s) got no score",
                    num_wanted - num_scored,
                    held.name,
                )
        completions = [c for of_set in of_sets for p in of_set for c in p.completions]
        oldest = min(completion.oldest_version for completion in completions)
        num_mixed = sum(completion.newest_version != oldest for completion in completions)
        return EvaluationResult(
            sets=tuple(
                summarize_set(held.name, held.settings, prompts)
                for held, prompts in zip(self._sets, of_sets, strict=True)
            ),
            version=oldest,
            newest_version=max(completion.newest_version for completion in completions),
            mixed_fraction=num_mixed / len(completions),
            seconds=seconds,
        )


def _evaluated(text: str, score: float, generation: Generation) -> EvaluatedCompletion:
    versions = [segment.version for segment in generation.segments]
    return EvaluatedCompletion(
        text=text,
        score=score,
        num_tokens=len(read_ids(generation)),
        finish_reason=generation.finish_reason,
        oldest_version=min(versions),
        newest_version=max(versions),
    )


def summarize_set(
    name: str, settings: EvaluationSet, prompts: Sequence[EvaluatedPrompt]
) -> SetResult:
    """Returns the results of one set, computed from those of its prompts that have a scored completion.

    The score of a prompt is the mean over its scored completions. Prompts with fewer than k scored
    completions do not count for pass@k. If that leaves no prompt, there is no pass@k.
    """
    completions = [completion for prompt in prompts for completion in prompt.completions]
    return SetResult(
        name=name,
        function=settings.function,
        score=fmean(fmean(c.score for c in prompt.completions) for prompt in prompts),
        num_prompts=len(prompts),
        num_completions=len(completions),
        pass_at={
            k: value for k in settings.pass_at if (value := _mean_pass_at(k, prompts)) is not None
        },
        length_mean=fmean(c.num_tokens for c in completions),
        length_max=max(c.num_tokens for c in completions),
        cut_fraction=fmean(c.finish_reason == "length" for c in completions),
        samples=tuple(prompts[:NUM_KEPT_SAMPLES]),
    )


def _mean_pass_at(k: int, prompts: Sequence[EvaluatedPrompt]) -> float | None:
    scores = [[c.score for c in prompt.completions] for prompt in prompts]
    of_prompts = [
        pass_at_k(len(of_prompt), sum(score >= _PASS_SCORE for score in of_prompt), k)
        for of_prompt in scores
        if len(of_prompt) >= k
    ]
    return fmean(of_prompts) if of_prompts else None


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` completions of a prompt passes.

    This is the unbiased estimator ``1 - C(n - c, k) / C(n, k)`` of Chen et al. (2021),
    https://arxiv.org/abs/2107.03374: of all choices of ``k`` among the ``n`` completions, the share
    that contains one of the ``c`` that passed.

    Example: of 4 completions 1 passed. Of the 6 pairs, 3 contain it, so pass@2 is 0.5.
    """
    assert 1 <= k <= num_samples and 0 <= num_passed <= num_samples, (num_samples, num_passed, k)
    # Python's integers are exact, and so is the quotient of two of any size.
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
