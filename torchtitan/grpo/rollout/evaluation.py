# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluates held-out prompts, decoded greedily by the servers that also generate the rollouts."""

import asyncio
import logging
import time
from collections.abc import Sequence

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentFailed
from torchtitan.grpo.rollout.results import EvaluationResult, EvaluationSample
from torchtitan.grpo.rollout.scoring import environment_columns, prompt_text
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import Generation, Prompt

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2


class Evaluator:
    """Evaluates a fixed set of prompts whenever it is called.

    Args:
        prompts: The held-out prompts.
        dispatcher: The servers.
        pool: Runs the reward functions.
        function: Position of ``evaluation.function`` in the pool.
        codec: Tokenizer of the model.
        writer: Generates completions. The evaluator always decodes greedily, whatever the
            sampling settings of this writer are.
        max_in_flight: ``rollout.max_concurrent_rollouts``. Rollouts in flight count as well.
        drops: Counts and announces prompts that get no score.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        dispatcher: Dispatcher,
        pool: RewardPool,
        function: int,
        codec: TextCodec,
        writer: TrajectoryWriter,
        max_in_flight: int,
        drops: DropLog | None = None,
    ) -> None:
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._pool = pool
        self._function = function
        self._codec = codec
        self._writer = writer.greedy()
        self._max_in_flight = max_in_flight
        self._drops = drops or DropLog()
        self._room = asyncio.Event()
        dispatcher.listeners.append(self._room.set)

    async def evaluate(self, version: int) -> EvaluationResult:
        """Evaluates once servers serve ``version`` or a newer one.

        A prompt is left out, with a warning, if generation or scoring failed or if its score is
        ``None``.

        Raises:
            RuntimeError: If no prompt received a score.
        """
        started = time.monotonic()
        tasks: list[asyncio.Task[tuple[EvaluationSample, int] | None]] = []
        # In a task group, a failed completion also interrupts the loop that starts the others.
        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                server = await self._wait_for_server(version)
                completion = self._writer.start(prompt, server).task
                tasks.append(group.create_task(self._sample(prompt, completion)))
        results = [task.result() for task in tasks]
        found = [result for result in results if result is not None]
        if not found:
            raise RuntimeError(
                f"None of the {len(results)} held-out prompts (evaluation.path) could be scored. "
                f"Last server error: {self._dispatcher.last_error or 'none'}."
            )
        if len(found) < len(results):
            logger.warning("%d held-out prompts got no score", len(results) - len(found))
        samples = tuple(sample for sample, _ in found)
        return EvaluationResult(
            score=sum(sample.score for sample in samples) / len(samples),
            num_prompts=len(samples),
            version=min(oldest for _, oldest in found),
            seconds=time.monotonic() - started,
            samples=samples,
        )

    def describe(self) -> str:
        """Describes what a running evaluation may be waiting for."""
        versions = {url: server.version for url, server in self._dispatcher.servers.items()}
        return f"evaluation: {self._dispatcher.in_flight} completions in flight; served: {versions}"

    async def _wait_for_server(self, version: int) -> Server:
        while True:
            self._room.clear()
            server = self._dispatcher.choose(lambda served: served >= version)
            if server is not None and self._dispatcher.in_flight < self._max_in_flight:
                return server
            try:
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                pass

    async def _sample(
        self, prompt: Prompt, completion: asyncio.Task[Generation]
    ) -> tuple[EvaluationSample, int] | None:
        try:
            generation = await completion
            ids = generation.token_ids.tolist()
            text = self._codec.decode(ids)
            columns = environment_columns([generation]) if self._writer.has_environment else None
            values = await self._pool.score(prompt, [text], [ids], [self._function], columns)
        except (ServerError, EnvironmentFailed, ScoringFailed) as error:
            self._drops.record("held-out prompt", f"prompt {prompt.index}: {error}")
            return None
        score = values[0][0]
        if score is None:
            return None
        oldest = min(segment.version for segment in generation.segments)
        return EvaluationSample(prompt_text(prompt), text, score), oldest
