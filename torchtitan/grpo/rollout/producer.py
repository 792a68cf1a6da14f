# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The loop that keeps servers busy: prompt -> server -> reward -> finished group.

Consumes prompts; produces batches of groups; waits for room under the staleness bound
(:mod:`.admission`) and on a server (:mod:`.dispatch`); unblocked by finished groups, new
versions on servers, and batches taken by the trainer.
"""

import asyncio
import logging
from dataclasses import dataclass

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rewards.pool import ScoringFailed
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.dispatch import Dispatcher, Server
from torchtitan.grpo.rollout.metrics import RolloutCounts, RolloutMetrics
from torchtitan.grpo.rollout.prompts import PromptStream
from torchtitan.grpo.rollout.requests import Sampling
from torchtitan.grpo.rollout.scoring import Scorer, prompt_text
from torchtitan.grpo.types import Generation, Prompt, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

# A group-relative advantage needs two.
_FEWEST_ROLLOUTS = 2
# A server's pause after a failure ends without an event, so the loop looks again.
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class ProducedBatch:
    """One batch, its groups ordered by ``group_id``; see ``link.RolloutBatch``."""

    groups: list[RolloutGroup]
    prompt_position: int
    metrics: dict[str, float]


class Producer:
    """Starts groups, follows each to its reward, and hands out batches.

    Args:
        prompts: Endless.
        admission: The staleness bound.
        dispatcher: The servers.
        scorer: The reward functions.
        sampling: Of the training rollouts.
        group_size: ``grpo.group_size``.
        prompt_position: Prompts already used up.
    """

    def __init__(
        self,
        prompts: PromptStream,
        admission: Admission,
        dispatcher: Dispatcher,
        scorer: Scorer,
        sampling: Sampling,
        *,
        group_size: int,
        prompt_position: int,
    ) -> None:
        self._prompts = prompts
        self._admission = admission
        self._dispatcher = dispatcher
        self._scorer = scorer
        self._sampling = sampling
        self._group_size = group_size
        self._prompt_position = prompt_position
        self._finished: dict[int, RolloutGroup] = {}
        self._counts = RolloutCounts()
        self._metrics = RolloutMetrics()
        self._room = asyncio.Event()
        self._group_done = asyncio.Event()
        dispatcher.listeners.append(self._room.set)

    async def run(self) -> None:
        """Starts groups for ever.

        Raises:
            ValueError: A prompt is bad.
            ServersFailing, RewardError: The run must stop.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                # Tokenising, and passing over long prompts, must not hold up the loop.
                prompt = await asyncio.to_thread(self._prompts.next)
                server = await self._wait_for_server()
                self._start_group(prompt, server, groups)

    async def batch(self, version: int) -> ProducedBatch:
        """Waits for the groups that turn ``version`` into ``version + 1``.

        Raises:
            RuntimeError: It is not this version's turn.
        """
        if version != self._admission.next_batch:
            raise RuntimeError(
                f"The trainer asked for the batch of version {version}, and the next batch here "
                f"is {self._admission.next_batch}: they are out of step."
            )
        while (group_ids := self._admission.take_batch()) is None:
            self._group_done.clear()
            await self._group_done.wait()
        self._room.set()
        # By id, so that a synchronous run is the same run each time.
        groups = [self._finished.pop(group_id) for group_id in sorted(group_ids)]
        self._use_up(groups[-1].group_id)
        return ProducedBatch(groups, self._prompt_position, self._batch_metrics(groups))

    def describe(self) -> str:
        """What a batch that is being waited for still lacks."""
        servers = self._dispatcher.servers.values()
        ready = sum(server.is_ready() for server in servers)
        text = f"{self._admission.describe()}; {ready} of {len(servers)} servers ready"
        if self._dispatcher.last_error:
            text += f"; last server error: {self._dispatcher.last_error}"
        return text

    async def _wait_for_server(self) -> Server:
        while True:
            self._room.clear()
            in_flight = self._dispatcher.in_flight
            server = self._dispatcher.choose(
                lambda version: self._admission.may_start(version, in_flight)  # noqa: B023
            )
            if server is not None:
                return server
            try:
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                pass

    def _start_group(self, prompt: Prompt, server: Server, groups: asyncio.TaskGroup) -> None:
        assert server.version is not None, f"{server.url} is not ready"
        self._admission.start(prompt.index, server.version)
        # Submitted here and not in the task below: they must count as in flight at once.
        completions = [
            self._dispatcher.submit(prompt, server, self._sampling) for _ in range(self._group_size)
        ]
        groups.create_task(self._follow_group(prompt, server, completions))

    async def _follow_group(
        self, prompt: Prompt, server: Server, completions: list[asyncio.Task[Generation]]
    ) -> None:
        rollouts = await self._scored_rollouts(prompt, completions)
        if rollouts is None:
            self._admission.close(prompt.index)
            self._use_up(prompt.index)
        else:
            self._finish(
                RolloutGroup(prompt.index, prompt_text(prompt), tuple(rollouts), server.url)
            )
        self._group_done.set()
        self._room.set()

    async def _scored_rollouts(
        self, prompt: Prompt, completions: list[asyncio.Task[Generation]]
    ) -> list[Rollout] | None:
        """The group's usable rollouts; None, and counted, where they are too few."""
        results = await asyncio.gather(*(_unless_failed(task) for task in completions))
        generations = [generation for generation in results if generation is not None]
        if len(generations) < _FEWEST_ROLLOUTS:
            self._counts.failed_groups += 1
            return None
        try:
            rollouts = await self._scorer.score(prompt, generations)
        except ScoringFailed:  # logged and counted by the pool
            rollouts = []
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        if len(scored) < _FEWEST_ROLLOUTS:
            self._counts.unscored_groups += 1
            return None
        return scored

    def _finish(self, group: RolloutGroup) -> None:
        oldest = min(rollout.oldest_version for rollout in group.rollouts)
        if self._admission.finish(group.group_id, oldest):
            self._finished[group.group_id] = group
            return
        self._counts.expired_groups += 1
        self._use_up(group.group_id)
        logger.warning(
            "Group %d holds tokens of version %d, older than %s was attested to serve when the "
            "group was started; the group is dropped.",
            group.group_id,
            oldest,
            group.server_url,
        )

    def _use_up(self, group_id: int) -> None:
        """A resumed run starts behind the furthest prompt that is done.

        Prompts before it that are still being written are then skipped: none is trained
        twice.
        """
        self._prompt_position = max(self._prompt_position, group_id + 1)

    def _batch_metrics(self, groups: list[RolloutGroup]) -> dict[str, float]:
        self._counts.failed_requests = self._dispatcher.num_failed_requests
        self._counts.tokens = self._dispatcher.num_tokens
        self._counts.prompts_too_long = self._prompts.num_too_long
        return self._metrics.of_batch(
            groups,
            self._counts,
            buffered=len(self._finished),
            in_flight=self._dispatcher.in_flight,
        )


async def _unless_failed(completion: asyncio.Task[Generation]) -> Generation | None:
    # A failed completion is data; what else is raised stops the run, and at once.
    try:
        return await completion
    except ServerError:
        return None
