# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluates without a run: servers, reward workers and held-out prompts, and no trainer.

The parts are those of a run's `session.py`, so a run would report the same figures for the same
weights.
"""

import asyncio
import logging
from collections.abc import Callable

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.inference.answers import UNPUSHED_VERSION
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.inputs import Inputs
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet
from torchtitan.grpo.rollout.session import make_dispatcher, make_evaluator
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class EvaluationSession:
    """Owns what one evaluation without a run needs. :meth:`close` may be called at any time."""

    def __init__(self, config: RolloutProcessConfig, announce: Callable[[str], None]) -> None:
        self._config = config
        self._drops = DropLog(announce)
        self._fleet = ServerFleet(config, announce)
        self._inputs = Inputs(config, self._drops, warn=announce)
        self._dispatcher: Dispatcher | None = None
        self._evaluator: Evaluator | None = None

    @property
    def servers(self) -> list[ServerInfo]:
        return self._fleet.servers

    async def open(self) -> None:
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.start())
            tasks.create_task(self._inputs.open_evaluation())
        self._dispatcher = make_dispatcher(config, self._fleet, self._drops)
        self._evaluator = make_evaluator(config, self._inputs, self._dispatcher, self._drops)

    async def evaluate(self) -> EvaluationResult:
        """Evaluates what the servers serve.

        Raises ``RuntimeError`` if no completion of a set received a score, and ``TimeoutError``
        after ``evaluation.timeout_seconds``.
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
        try:
            await self._inputs.close()
            if self._dispatcher is not None:
                await self._dispatcher.close()
        finally:
            await self._fleet.close()

    async def _keep_versions(self, dispatcher: Dispatcher) -> None:
        """Tells the dispatcher, in place of a trainer, what each server serves.

        The servers may belong to a run, which pushes weights to them, or may be started again.
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
