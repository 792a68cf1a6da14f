# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Generates completions driven by programs or environments. The others come from `TrajectoryWriter`."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.agents.answering import EpisodeSettings
from torchtitan.grpo.rollout.agents.endpoint import AgentEndpoint
from torchtitan.grpo.rollout.agents.episode import AgentEpisode
from torchtitan.grpo.rollout.agents.programs import Access, Programs, make_programs, reward_of
from torchtitan.grpo.rollout.agents.tool_calls import parser_of
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments.program import Environments
from torchtitan.grpo.rollout.environments.protocol import EnvironmentFailed
from torchtitan.grpo.rollout.serving.dispatcher import Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import Places
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import Trajectory
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.cores import usable_cores
from torchtitan.grpo.types import Generation, Prompt
from torchtitan.grpo.workers.owner import FailureLimit
from torchtitan.grpo.workers.process import WorkerLost

# If an episode's worker ends more often than this, the episode is assumed to be the cause.
_MAX_LOST = 2
_LOOK_SECONDS = 1.0
# Of a process until its first request: before it has failed, and before others may have its core.
_START_SECONDS, _STARTING_SECONDS = 300.0, 30.0


@dataclass(frozen=True)
class Agents:
    """The programs of a run, and the endpoint where they reach the model.

    An episode may take ``start_seconds`` until its first request, and ``own_seconds`` after it, not
    counting the model's time. ``starting`` limits how many programs start at once. ``goes_on`` is
    False: an interrupted episode begins anew.
    """

    endpoint: AgentEndpoint
    programs: Programs
    own_seconds: float
    start_seconds: float
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(sys.maxsize))
    goes_on = False

    @classmethod
    def of(cls, config: RolloutProcessConfig, drops: DropLog, name: str = "") -> "Agents":
        agent = config.agent
        programs = make_programs(agent, config.rollout, config.workers, drops.record_episode, name)
        return cls(
            AgentEndpoint(agent.host, config.seq_len),
            programs,
            agent.timeout_seconds,
            max(agent.timeout_seconds, _START_SECONDS if agent.command else 0),
            asyncio.Semaphore(usable_cores() if agent.command else sys.maxsize),
        )

    @property
    def limit(self) -> FailureLimit:
        return self.programs.limit

    async def start(self) -> None:
        await self.endpoint.start()
        await self.programs.start()

    async def close(self) -> None:
        await self.programs.close()
        await self.endpoint.close()

    async def run(self, prompt: Prompt, episode: AgentEpisode) -> Any:
        access = Access(self.endpoint.url, episode.key, episode.name)
        self.endpoint.open(episode)
        try:
            return await self.programs.run(prompt, access)
        finally:
            self.endpoint.forget(episode)

    def metrics(self, counts: dict[str, int]) -> dict[str, float]:
        failures, num_episodes = self.limit.failures, max(counts["episodes"], 1)
        return {
            "agent/requests": counts["requests"] / num_episodes,
            "agent/conversations": counts["conversations"] / num_episodes,
            "agent/rows": counts["rows"] / num_episodes,
            "agent/start_seconds": counts["start_milliseconds"] / 1000 / num_episodes,
            "agent/own_seconds": counts["own_milliseconds"] / 1000 / num_episodes,
            "agent/untrained_answers": float(counts["masked"]),
            "agent/ignored_settings": float(counts["ignored"]),
            "agent/failed_episodes": float(failures.total()),
            "agent/timeouts": float(failures["timeout"]),
            "agent/begun_again": float(counts["begun_again"]),
        }


Players = Agents | Environments


class EpisodeWriter:
    """Starts episodes, and returns the rows of each as one completion.

    An episode begins again if the run was stopped, or if the episode's worker process was lost.
    """

    has_environment = True

    def __init__(
        self,
        places: Places,
        sampling: Sampling,
        config: RolloutProcessConfig,
        codec: TextCodec,
        players: Players,
    ) -> None:
        self._players, self._kind = players, "agent" if config.agent.is_used else "environment"
        self._settings = EpisodeSettings(
            places=places,
            sampling=sampling,
            codec=codec.bounded(sampling.max_total_tokens),
            parser=parser_of(codec.template) if codec.has_chat_template() else None,
            config=config,
        )

    def start(
        self,
        prompt: Prompt,
        server: Server,
        *,
        sample: int = 0,
        begun: Generation | None = None,
        expected_tokens: float | None = None,
    ) -> Trajectory:
        """Starts an episode. Its requests go to ``server``, or to others that have at least its version."""
        floor, goes_on = server.version, self._players.goes_on
        assert floor is not None, f"{server.url} is not ready"
        trajectory = Trajectory(prompt, begun if goes_on else None, sample)

        def note(so_far: Generation) -> None:
            trajectory.so_far = so_far

        def begin() -> AgentEpisode:
            return AgentEpisode(
                self._settings,
                prompt,
                sample,
                floor,
                server,
                begun=trajectory.so_far,
                on_progress=note if goes_on else None,
                expected_tokens=expected_tokens if goes_on else None,
            )

        first = begin()
        trajectory.task = asyncio.create_task(self._write(prompt, first, begin))
        trajectory.task.add_done_callback(lambda _: first.close())  # also if it never began
        return trajectory

    def metrics(self) -> dict[str, float]:
        return self._players.metrics(self._settings.counts)

    async def _write(
        self, prompt: Prompt, episode: AgentEpisode, begin: Callable[[], AgentEpisode]
    ) -> Generation:
        limit = self._players.limit
        num_lost = 0
        while True:
            try:
                with spans.span("episodes", self._kind, group=prompt.group_id):
                    whole = await self._episode(prompt, episode)
            except WorkerLost as error:
                num_lost += 1
                self._settings.counts["begun_again"] += 1
                if num_lost > _MAX_LOST:
                    text = f"The worker processes of one episode have ended {num_lost} times."
                    failure = EnvironmentFailed("crash", text)
                    limit.record_failure(failure)
                    raise failure from error
                episode = begin()
            except EnvironmentFailed as error:
                limit.record_failure(error)
                episode.reward = None
                error.blame(episode.whole())
                raise
            else:
                limit.record_success()
                return whole

    async def _episode(self, prompt: Prompt, episode: AgentEpisode) -> Generation:
        await self._players.starting.acquire()
        episode.begin()
        program = asyncio.create_task(self._players.run(prompt, episode))
        try:
            try:
                seconds = min(self._players.start_seconds, _STARTING_SECONDS)
                await _first_of({program, episode.asked}, seconds)
            finally:
                self._players.starting.release()
            reward = reward_of(await self._result(program, episode))
            episode.reward = episode.reward if reward is None else reward
            whole = episode.whole()
            if whole is None:
                raise EnvironmentFailed(
                    "no request",
                    "The program of [agent] must ask the model at OPENAI_BASE_URL at least once, but "
                    "it ended without a request. Does it use OPENAI_BASE_URL and OPENAI_API_KEY?",
                )
            self._count(episode)
            return whole
        finally:
            episode.close()
            program.cancel()
            await asyncio.wait({program})  # killing a process takes milliseconds

    async def _result(self, program: "asyncio.Task[object]", episode: AgentEpisode) -> object:
        """Waits for a program's result. Raises EnvironmentFailed at a time limit, or the ServerError."""
        while not program.done():
            has_asked = episode.asked.done()
            limit = self._players.own_seconds if has_asked else self._players.start_seconds
            left = limit - episode.own_seconds()
            if left <= 0:
                what = "took longer than" if has_asked else "sent no request within"
                raise EnvironmentFailed(
                    "timeout",
                    f"An agent {what} {limit:g} s (agent.timeout_seconds = {self._players.own_seconds:g}), not "
                    "counting the time in which the model wrote; its program was ended.",
                )
            # The time stands still while the model writes, and begins again with the first request.
            await _first_of({program, episode.failed}, min(left, _LOOK_SECONDS))
            if episode.failed.done():
                episode.failed.result()
        return program.result()

    def _count(self, episode: AgentEpisode) -> None:
        counts = self._settings.counts
        counts.update(episode.counts)
        counts["episodes"] += 1
        counts["rows"] += episode.num_rows
        counts["own_milliseconds"] += round(1000 * episode.own_seconds())
        counts["start_milliseconds"] += round(1000 * episode.start_seconds)


async def _first_of(futures: set[asyncio.Future[Any]], seconds: float) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
