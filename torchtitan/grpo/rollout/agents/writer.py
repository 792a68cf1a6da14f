# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes completions that programs drive, in the place of a `TrajectoryWriter`."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.agents.answering import EpisodeSettings
from torchtitan.grpo.rollout.agents.endpoint import AgentEndpoint
from torchtitan.grpo.rollout.agents.episode import AgentEpisode
from torchtitan.grpo.rollout.agents.programs import Access, Programs, make_programs, reward_of
from torchtitan.grpo.rollout.agents.tool_calls import parser_of
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentFailed
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import Trajectory
from torchtitan.grpo.system.cores import usable_cores
from torchtitan.grpo.types import Generation, Prompt
from torchtitan.grpo.workers.process import WorkerLost

# If an episode's worker ends more often than this, the episode is assumed to be the cause.
_MAX_LOST = 2
_LOOK_SECONDS = 1.0
# Of a process until its first request: before it has failed, and before others may have its core.
_START_SECONDS, _STARTING_SECONDS = 300.0, 30.0


@dataclass(frozen=True)
class Agents:
    """The programs of a run, where they reach the model, and places for those that start."""

    endpoint: AgentEndpoint
    programs: Programs
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(sys.maxsize))

    @classmethod
    def of(cls, config: RolloutProcessConfig, drops: DropLog, name: str = "") -> "Agents":
        programs = make_programs(
            config.agent, config.rollout, config.workers, drops.record_episode, name
        )
        most = config.agent.max_starting or usable_cores()
        starting = asyncio.Semaphore(most if config.agent.command else sys.maxsize)
        return cls(AgentEndpoint(config.agent.host, config.seq_len), programs, starting)

    async def start(self) -> None:
        await self.endpoint.start()
        await self.programs.start()

    async def close(self) -> None:
        await self.programs.close()
        await self.endpoint.close()


class AgentWriter:
    """Starts episodes, and returns the rows of each as one completion.

    An episode of a stopped run, or of a lost worker, begins again: what it had is dropped.
    """

    has_environment = True

    def __init__(
        self,
        places: Dispatcher | SpareSlots,
        sampling: Sampling,
        config: RolloutProcessConfig,
        codec: TextCodec,
        agents: Agents,
    ) -> None:
        self._agents = agents
        self._timeout = config.agent.timeout_seconds
        self._start_timeout = max(self._timeout, _START_SECONDS if config.agent.command else 0)
        self._settings = EpisodeSettings(
            places=places,
            sampling=sampling,
            codec=codec.bounded(sampling.max_total_tokens),
            parser=parser_of(codec.template) if codec.has_chat_template() else None,
            config=config,
        )

    def start(
        self, prompt: Prompt, server: Server, *, sample: int = 0, **unused: object
    ) -> Trajectory:
        """Starts an episode; its requests go to ``server``, or to one of no older version."""
        floor = server.version
        assert floor is not None, f"{server.url} is not ready"
        trajectory = Trajectory(prompt, None, sample)
        begin = partial(AgentEpisode, self._settings, prompt, sample, floor, server)
        first = begin()
        trajectory.task = asyncio.create_task(self._write(prompt, first, begin))
        trajectory.task.add_done_callback(lambda _: first.close())  # also if it never began
        return trajectory

    def metrics(self) -> dict[str, float]:
        counts, failures = self._settings.counts, self._agents.programs.limit.failures
        num_episodes = max(counts["episodes"], 1)
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

    async def _write(
        self, prompt: Prompt, episode: AgentEpisode, begin: Callable[[], AgentEpisode]
    ) -> Generation:
        limit = self._agents.programs.limit
        num_lost = 0
        while True:
            try:
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
        endpoint, programs = self._agents.endpoint, self._agents.programs
        await self._agents.starting.acquire()
        episode.begin()
        endpoint.open(episode)
        access = Access(endpoint.url, episode.key, episode.name)
        program = asyncio.create_task(programs.run(prompt, access))
        try:
            try:
                seconds = min(self._start_timeout, _STARTING_SECONDS)
                await _first_of({program, episode.asked}, seconds)
            finally:
                self._agents.starting.release()
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
            endpoint.forget(episode)
            episode.close()
            program.cancel()
            await asyncio.wait({program})  # killing a process takes milliseconds

    async def _result(self, program: "asyncio.Task[object]", episode: AgentEpisode) -> object:
        """Waits for a program; raises EnvironmentFailed after its own time, and ServerError."""
        while not program.done():
            has_asked = episode.asked.done()
            limit = self._timeout if has_asked else self._start_timeout
            left = limit - episode.own_seconds()
            if left <= 0:
                what = "took longer than" if has_asked else "sent no request within"
                raise EnvironmentFailed(
                    "timeout",
                    f"An agent {what} {limit:g} s (agent.timeout_seconds = {self._timeout:g}), not "
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
