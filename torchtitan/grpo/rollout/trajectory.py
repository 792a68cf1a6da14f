# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Generates one completion in one or several segments, on one or several servers.

With ``rollout.segment_tokens`` a server generates only that many tokens per request. The next
segment goes to any server that has room. Its prompt includes all earlier segments, which a prefix
cache can supply. A lost server or a stopped run then costs one segment at most. The completion
is the same as one from a single request: tokens and logprobs are kept as the servers returned
them, and each token has the version that generated it.

Completions of environments and agents are written by an `EpisodeWriter` (`agents/writer.py`).
"""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.environments.protocol import EnvironmentFailed
from torchtitan.grpo.rollout.serving.dispatcher import Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import Places, next_server
from torchtitan.grpo.types import Generation, Prompt, joined, without_contexts
from torchtitan.grpo.types import Rollout as ScoredRollout


@dataclass(eq=False)
class Trajectory:
    """A completion that is being generated; ``so_far`` joins its finished segments."""

    prompt: Prompt
    so_far: Generation | None = None
    sample: int = 0
    task: "asyncio.Task[Generation]" = field(init=False)

    def result(self) -> Generation | None:
        """The whole completion, or ``None`` if it is unfinished or has failed."""
        task = self.task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def until_ended(self) -> None:
        """Waits until the completion is whole, or a server or its environment has made it fail."""
        with contextlib.suppress(ServerError, EnvironmentFailed):
            await self.task


@dataclass(eq=False)
class RunningGroup:
    """A group in progress. ``kept`` are completions from before a resumption, ``trajectories`` the others.

    ``task`` waits for the trajectories and judges the group. It is ``None`` once they have ended: from
    then on, the group cannot be cancelled.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    kept: tuple[Generation, ...]
    task: asyncio.Task[None] | None = None
    judged: list[ScoredRollout] = field(default_factory=list)

    def done(self) -> tuple[Generation, ...]:
        results = (trajectory.result() for trajectory in self.trajectories)
        return (*self.kept, *(result for result in results if result is not None))

    def failures(self) -> list[EnvironmentFailed]:
        """The errors of completions that ended because an environment or agent program failed."""
        ended = (t.task for t in self.trajectories if t.task.done() and not t.task.cancelled())
        return [error for task in ended if isinstance(error := task.exception(), EnvironmentFailed)]

    def begun(self) -> tuple[Generation, ...]:
        """What was generated of unfinished completions, including those cancelled by a stopping run."""
        running = (t.so_far for t in self.trajectories if not t.task.done() or t.task.cancelled())
        return tuple(so_far for so_far in running if so_far is not None)

    def cancel(self) -> None:
        for trajectory in self.trajectories:
            trajectory.task.cancel()
        if self.task is not None:
            self.task.cancel()


class CompletionWriter(Protocol):
    """Starts completions: a `TrajectoryWriter`, or an `EpisodeWriter`."""

    @property
    def has_environment(self) -> bool:
        """Whether completions come from an environment or agent, which may also return rewards."""
        ...

    def start(
        self,
        prompt: Prompt,
        server: Server,
        *,
        sample: int = 0,
        begun: Generation | None = None,
        expected_tokens: float | None = None,
    ) -> Trajectory: ...

    def metrics(self) -> dict[str, float]: ...


class TrajectoryWriter:
    """Starts completions with the same sampling settings and carries each one to its end."""

    has_environment = False

    def __init__(self, places: Places, sampling: Sampling, config: Rollout) -> None:
        self._places, self._sampling = places, sampling
        self._segment_tokens = config.segment_tokens
        self._wait_seconds = config.request_timeout_seconds

    def start(
        self,
        prompt: Prompt,
        server: Server,
        *,
        sample: int = 0,
        begun: Generation | None = None,
        expected_tokens: float | None = None,
    ) -> Trajectory:
        """Starts a completion on a ready server. Its first segment is in flight immediately.

        ``sample`` is the completion's index in its group, and ``begun`` its part that exists already.
        """
        if begun is not None and not self._is_unfinished(prompt, begun):
            begun = None  # from a run with an environment, while this run has none
        trajectory = Trajectory(prompt, begun, sample)
        # Read here and not in the task below: the server may be lost before the task starts.
        floor = server.version
        assert floor is not None, f"{server.url} is not ready"
        first = self._submit(trajectory, server, expected_tokens)
        trajectory.task = asyncio.create_task(
            self._write(trajectory, floor, server, first, expected_tokens)
        )
        return trajectory

    def metrics(self) -> dict[str, float]:
        return {}

    async def _write(
        self,
        trajectory: Trajectory,
        floor: int,
        server: Server,
        segment: "asyncio.Task[Generation]",
        expected_tokens: float | None,
    ) -> Generation:
        """Generates the rest of a completion, on servers of version ``floor`` or newer."""
        while True:
            # Cancelling this task also cancels the segment, which notifies the server.
            whole = trajectory.so_far = joined(trajectory.so_far, await segment)
            if not self._is_unfinished(trajectory.prompt, whole):
                return whole
            server = await next_server(self._places, floor, server.url, self._wait_seconds)
            segment = self._submit(trajectory, server, expected_tokens)

    def _is_unfinished(self, prompt: Prompt, whole: Generation) -> bool:
        """Returns whether only the segment's length has cut the completion, so that it may go on."""
        return whole.finish_reason == "length" and self._room_behind(prompt, whole) > 0

    def _submit(
        self, trajectory: Trajectory, server: Server, expected_tokens: float | None
    ) -> "asyncio.Task[Generation]":
        prompt, so_far, num_written = trajectory.prompt, trajectory.so_far, 0
        room = self._sampling.room_after(prompt)
        if so_far is not None:
            room, num_written = self._room_behind(prompt, so_far), len(so_far.token_ids)
            prompt = replace(prompt, token_ids=_context(prompt, so_far))
            if expected_tokens is not None:
                expected_tokens = max(expected_tokens - num_written, 1.0)
        assert room > 0, "an unfinished completion must have room for more tokens"
        sampling = self._sampling.of_sample(prompt, trajectory.sample, num_written)
        sampling = replace(sampling, max_new_tokens=min(room, self._segment_tokens or room))
        return self._places.submit(prompt, server, sampling, expected_tokens=expected_tokens)

    def _room_behind(self, prompt: Prompt, whole: Generation) -> int:
        """How many more tokens may follow. Contexts that begin new rows do not count as generated."""
        sampling = self._sampling
        in_row = sampling.max_total_tokens - len(_context(prompt, whole))
        written = without_contexts(whole.token_ids, whole.new_rows)
        return min(in_row, sampling.max_new_tokens - len(written))


def _context(prompt: Prompt, whole: Generation) -> np.ndarray:
    """The tokens that the model sees when it goes on with a completion."""
    if whole.new_rows:
        return whole.token_ids[whole.new_rows[-1][0] :]
    return np.concatenate([prompt.token_ids, whole.token_ids])
