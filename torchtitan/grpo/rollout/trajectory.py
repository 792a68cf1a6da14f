# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion, written in one or several segments, on one or several servers.

With ``rollout.segment_tokens`` a server is asked for so many tokens at a time, and whoever has
room writes the next ones, after a prompt that holds all before: a server that keeps its prefix
cache computes nothing twice. What a lost server or a stopped run costs is then one segment,
and long answers move away from busy servers. Whoever waits for the completion notices nothing:
tokens and logprobs are as the servers wrote them, never tokenised again, and each token has
the version that it was written under.

With ``rollout.environment`` an environment reads each turn, and what it observes is put behind
it; see `environments`. The next turn is a segment of the same completion.
"""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.environments import EnvironmentFailed, Episode, Episodes
from torchtitan.grpo.rollout.joining import joined
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import Generation, Prompt

# How often a completion that no server can go on with looks for one.
_LOOK_SECONDS = 0.05


@dataclass(eq=False)
class Trajectory:
    """A completion under way.

    Attributes:
        prompt: What it answers.
        so_far: What is written of it; None before the first segment.
        is_cut: It was ended where it was.
        task: Its end.
    """

    prompt: Prompt
    so_far: Generation | None = None
    is_cut: bool = field(default=False, init=False)
    task: "asyncio.Task[Generation]" = field(init=False)

    def result(self) -> Generation | None:
        """The completion, once it is whole or cut; None while it is not, and where it failed."""
        task = self.task
        if self.is_cut:
            return self.so_far
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    def cut(self) -> None:
        """Ends it with the segments that are written by now."""
        self.is_cut = True
        self.task.cancel()

    async def until_ended(self) -> None:
        """Returns when it is whole, cut, or has failed, which is data.

        Raises:
            Exception: Something else ended it; the run must stop.
        """
        try:
            await self.task
        except (ServerError, EnvironmentFailed):
            pass
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self.is_cut or (caller is not None and caller.cancelling()):
                raise


class TrajectoryWriter:
    """Starts completions and sees them through.

    Args:
        dispatcher: The servers.
        sampling: Of all completions.
        segment_tokens: ``rollout.segment_tokens``; 0 is one segment a completion.
        wait_seconds: Longest wait for a server between two segments.
        episodes: Gives each completion its environment; None is one turn a completion.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        sampling: Sampling,
        *,
        segment_tokens: int = 0,
        wait_seconds: float = 600.0,
        episodes: Episodes | None = None,
    ) -> None:
        self._dispatcher, self._sampling = dispatcher, sampling
        self._episodes = episodes
        self._segment_tokens = segment_tokens
        self._wait_seconds = wait_seconds

    def greedy(self) -> "TrajectoryWriter":
        """Returns a writer that decodes greedily and is the same in all other respects."""
        return TrajectoryWriter(
            self._dispatcher,
            self._sampling.greedy(),
            segment_tokens=self._segment_tokens,
            wait_seconds=self._wait_seconds,
            episodes=self._episodes,
        )

    def start(
        self,
        prompt: Prompt,
        server: Server,
        *,
        begun: Generation | None = None,
        expected_tokens: float | None = None,
    ) -> Trajectory:
        """Starts a completion on a ready server; its first segment is in flight at once.

        Args:
            prompt: What is asked.
            server: From ``Dispatcher.choose``.
            begun: What was written of it before.
            expected_tokens: Probable length of the whole.
        """
        if begun is not None and self._episodes is None and not self._goes_on(prompt, begun):
            begun = None  # of a run with an environment, which this one has not
        trajectory = Trajectory(prompt, begun)
        # Now, and not in the task below: the server may be lost before that begins.
        floor = server.version
        assert floor is not None, f"{server.url} is not ready"
        first = None
        if begun is None or self._goes_on(prompt, begun):
            first = self._submit(trajectory, server, expected_tokens)
        episode = None if self._episodes is None else self._episodes.open(prompt)
        trajectory.task = asyncio.create_task(
            self._write(trajectory, floor, server, first, expected_tokens, episode)
        )
        return trajectory

    @property
    def has_environment(self) -> bool:
        """Whether completions may have several turns."""
        return self._episodes is not None

    def metrics(self) -> dict[str, float]:
        """What there is to say of environments."""
        return {} if self._episodes is None else self._episodes.metrics()

    async def _write(
        self,
        trajectory: Trajectory,
        floor: int,
        server: Server,
        segment: "asyncio.Task[Generation] | None",
        expected_tokens: float | None,
        episode: Episode | None,
    ) -> Generation:
        """Writes to the end.

        Args:
            trajectory: What is written of it before is its ``so_far``.
            floor: The oldest version that it takes.
            server: Of the first segment.
            segment: In flight; None where the environment is to read a turn first.
            expected_tokens: Probable length of the whole.
            episode: Its environment, closed at the end.
        """
        try:
            while True:
                if segment is not None:
                    # A task of its own: cancelled with this one, it tells the server.
                    trajectory.so_far = joined(trajectory.so_far, await segment)
                whole = trajectory.so_far
                assert whole is not None, "what is not begun has a segment in flight"
                if not self._goes_on(trajectory.prompt, whole):
                    if episode is None:
                        return whole
                    with self._dispatcher.hold():
                        followed = await episode.follow(whole, self._room(trajectory))
                    trajectory.so_far = followed.generation
                    if followed.is_over:
                        assert followed.generation is not None, "what is over is there"
                        return followed.generation
                server = await self._next_server(floor, server)
                segment = self._submit(trajectory, server, expected_tokens)
        finally:
            if episode is not None:
                episode.close()

    def _goes_on(self, prompt: Prompt, whole: Generation) -> bool:
        """Whether the model's turn was cut at the end of a segment, and has room for more."""
        room = self._sampling.room_after(prompt) - len(whole.token_ids)
        return whole.finish_reason == "length" and room > 0

    def _submit(
        self, trajectory: Trajectory, server: Server, expected_tokens: float | None
    ) -> "asyncio.Task[Generation]":
        room = self._room(trajectory)
        assert room > 0, "a completion that is begun has room for more"
        segment = min(room, self._segment_tokens or room)
        prompt = trajectory.prompt
        if trajectory.so_far is not None:
            written = trajectory.so_far.token_ids
            prompt = replace(prompt, token_ids=np.concatenate([prompt.token_ids, written]))
            if expected_tokens is not None:
                expected_tokens = max(expected_tokens - len(written), 1.0)
        sampling = replace(self._sampling, max_new_tokens=segment)
        return self._dispatcher.submit(prompt, server, sampling, expected_tokens=expected_tokens)

    def _room(self, trajectory: Trajectory) -> int:
        """Tokens that may still be written."""
        written = 0 if trajectory.so_far is None else len(trajectory.so_far.token_ids)
        return self._sampling.room_after(trajectory.prompt) - written

    async def _next_server(self, floor: int, former: Server) -> Server:
        """The former one, which has the prefix, or whoever can go on."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                while True:
                    server = self._dispatcher.choose(
                        lambda version: version >= floor, prefer=former.url, has_begun=True
                    )
                    if server is not None:
                        return server
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as error:
            raise ServerError(
                f"A completion must be gone on with within rollout.request_timeout_seconds = "
                f"{self._wait_seconds:g}, and no server of policy_version {floor} or newer was "
                f"ready for it. It was written on {former.url} before."
            ) from error
