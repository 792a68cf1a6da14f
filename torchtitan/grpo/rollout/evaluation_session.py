# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluates without a run: servers, reward workers and held-out prompts, and no trainer.

The parts are those of a run's `session.py`, so that the figures are those that the run would report
for the same weights.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import evaluation_sets, set_key
from torchtitan.grpo.inference.answers import UNPUSHED_VERSION
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rewards.gold_answers import MAX_ROWS, Example, answer_warnings
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentPool
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.model_match import prompt_notes
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet
from torchtitan.grpo.rollout.session_parts import (
    evaluation_functions,
    make_codec,
    make_dispatcher,
    make_environment_pool,
    make_evaluation_pool,
    make_evaluator,
    open_held_out,
)
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt, ServerInfo

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class EvaluationSession:
    """Owns what one evaluation without a run needs.

    :meth:`close` may be called at any time, also after an :meth:`open` that failed.
    """

    def __init__(self, config: RolloutProcessConfig, announce: Callable[[str], None]) -> None:
        self._config, self._announce = config, announce
        self._drops = DropLog(announce)
        self._fleet = ServerFleet(config, announce)
        self._pool: RewardPool | None = None
        self._environments: EnvironmentPool | None = None
        self._dispatcher: Dispatcher | None = None
        self._evaluator: Evaluator | None = None

    @property
    def servers(self) -> list[ServerInfo]:
        """The servers, once they are up."""
        return self._fleet.servers

    async def open(self) -> None:
        """Starts servers and workers, and opens the held-out prompts."""
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.start())
            opening = tasks.create_task(self._open_inputs())
        codec, held_out = opening.result()
        self._dispatcher = make_dispatcher(config, self._fleet.clients, self._drops)
        self._evaluator = make_evaluator(
            config, held_out, codec, self._dispatcher, self._pool, self._environments, self._drops
        )

    async def evaluate(self) -> EvaluationResult:
        """Evaluates what the servers serve.

        Raises:
            RuntimeError: If no completion of a set received a score.
            TimeoutError: If the evaluation takes longer than ``evaluation.timeout_seconds``.
        """
        dispatcher, evaluator = self._dispatcher, self._evaluator
        assert dispatcher is not None and evaluator is not None, "open() comes first"
        limit = self._config.evaluation.timeout_seconds
        keeping = asyncio.create_task(self._keep_versions(dispatcher))
        watching = asyncio.create_task(self._fleet.watch(dispatcher, _ignore))
        evaluating = asyncio.create_task(evaluator.evaluate(UNPUSHED_VERSION))
        tasks = {keeping, watching, evaluating}
        try:
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {evaluating}:
                task.result()  # a server has ended for good
            if evaluating not in done:
                raise TimeoutError(
                    f"The evaluation must end within evaluation.timeout_seconds = {limit:g}: "
                    f"{evaluator.describe()}. Raise it, or lower evaluation.num_prompts."
                )
            return evaluating.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stops everything that was started, in bounded time."""
        try:
            if self._pool is not None:
                await self._pool.close()
            if self._environments is not None:
                await self._environments.close()
            if self._dispatcher is not None:
                await self._dispatcher.close()
        finally:
            await self._fleet.close()

    async def _open_inputs(self) -> tuple[TextCodec, dict[str, list[Prompt]]]:
        config = self._config
        codec = await asyncio.to_thread(make_codec, config)
        held_out = await asyncio.to_thread(open_held_out, config, codec, self._drops)
        is_chat = any(not isinstance(of_set[0].text, str) for of_set in held_out.values())
        notes = list(prompt_notes(codec, is_chat=is_chat))
        self._pool = pool = make_evaluation_pool(config, self._drops)
        assert pool is not None, "there must be something to evaluate"
        await pool.start()
        columns = {}
        if config.rollout.environment is not None:
            self._environments = make_environment_pool(config, self._drops)
            await self._environments.start()
            columns = {"environment_reward": [0.0]}
        _, warnings = await check_held_out(config, pool, held_out, codec, columns)
        for warning in [*notes, *warnings]:
            self._announce(warning)
        return codec, held_out

    async def _keep_versions(self, dispatcher: Dispatcher) -> None:
        """Tells the dispatcher what each server serves, forever.

        In a run the trainer does that, which attests its pushes. Here nobody pushes, but the
        servers may belong to a run that does, or may be started again.
        """
        while True:
            for server in list(dispatcher.servers.values()):
                try:
                    async with asyncio.timeout(self._config.inference.control_timeout_seconds):
                        served = await server.client.version()
                except (ServerError, TimeoutError) as error:
                    logger.info("%s does not tell its version: %s", server.url, error)
                    continue
                version = UNPUSHED_VERSION if served is None else served
                if not server.is_down and (server.version is None or version > server.version):
                    dispatcher.set_version(server.url, version)
            await asyncio.sleep(_LOOK_SECONDS)


async def _ignore(servers: list[ServerInfo]) -> None:
    """Takes the news that the servers have changed, which concerns the trainer of a run."""


async def check_held_out(
    config: RolloutProcessConfig,
    pool: RewardPool,
    held_out: Mapping[str, Sequence[Prompt]],
    codec: TextCodec,
    columns: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, float | None], list[str]]:
    """Calls the function of each set of held-out prompts once, and checks its answers.

    ``columns`` are further arguments for the functions, with one value each.

    Returns:
        What each function gives the first prompt with an empty completion, and warnings.

    Raises:
        RewardError: If a function raises, exceeds the time limit, or returns an unusable value.
    """
    scores, warnings = {}, []
    for name, settings in evaluation_sets(config.evaluation).items():
        prompts = held_out[name]
        position = evaluation_functions(config).index(settings.function)
        (scores[name],) = await pool.check(prompts[0], [position], columns)
        rows = [Example(f"{settings.path}, row {p.group_id}", p) for p in prompts[:MAX_ROWS]]
        key = set_key(config.evaluation, name, "path")
        most = settings.max_new_tokens or config.rollout.max_new_tokens
        warnings += await answer_warnings(pool, position, rows, key, codec.count, most)
    return scores, warnings
