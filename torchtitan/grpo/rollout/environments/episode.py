# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs one completion with its environment, which can be replaced during the completion.

The completion's tokens determine the state of an episode: the model writes ``3 * 4 =``, the
environment ``1 2``, the model ``. <eos>``::

    token_ids   3 * 4 = 1 2 . <eos>
    sampled     1 1 1 1 0 0 1 1
    turns       [3 * 4 =] observed [1 2], [. <eos>]

A turn ends with each stop token, because no server generates past one, and before each token
that was not sampled. After its process was lost, or after a resume, a new environment gets the
same turns. If it makes other observations than the completion has, the completion starts again.

A chat template may write earlier turns differently from the model, for example without their
thinking (``rollout.earlier_turns``). The context of the next turn then begins a new training
row, so that each turn is trained on with the context with which it was generated.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.grpo.rewards.reward_calls import LARGEST_REWARD
from torchtitan.grpo.rollout.agents.failures import EnvironmentFailed
from torchtitan.grpo.rollout.chat_template import LeftOut, tools_of
from torchtitan.grpo.rollout.environments.environment_pool import (
    EnvironmentPool,
    RemoteEnvironment,
)
from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Generation, Prompt, joined, unsampled
from torchtitan.grpo.workers.process import WorkerLost

# If the processes of an episode end more often than this, the episode is assumed to be the cause.
_MAX_LOST = 2
_MAX_RESTARTS = 1


@dataclass(frozen=True)
class Shown:
    """Tokens that follow a turn, or with ``begins_row`` the whole context of the next turn."""

    token_ids: list[int]
    begins_row: bool = False


class Conversation:
    """The messages of one episode, and the text of the row that is being written."""

    def __init__(
        self,
        codec: TextCodec,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._codec, self._tools = codec, tools
        self._messages = list(messages)
        self._row: str | None = None  # rendered when first needed, which may take seconds
        self._unfinished = ""  # beginning of the assistant's message that later turns continue

    def insert(self, turn_ids: Sequence[int], text: str, inserted: Sequence[int]) -> None:
        """Adds a turn and what an environment inserted after it; the message continues."""
        self._row = self._row_with([*turn_ids, *inserted])
        self._unfinished += text + self._codec.decode_exactly(inserted)

    def reply(
        self, turn_ids: Sequence[int], text: str, messages: Sequence[dict[str, Any]]
    ) -> Shown:
        """Adds a turn and the messages after it. Tokenizes what the template adds, or the whole."""
        codec = self._codec
        row = self._row_with(turn_ids)
        content, self._unfinished = self._unfinished + text, ""
        self._messages += [{"role": "assistant", "content": content}, *messages]
        self._row = rendered = codec.template.render(self._messages, tools=self._tools)
        if rendered.startswith(row):
            return Shown(codec.encode_continuation(rendered[len(row) :]))
        return Shown(codec.encode_continuation(rendered), begins_row=True)

    def _row_with(self, token_ids: Sequence[int]) -> str:
        row = self._row
        if row is None:
            row = self._codec.template.render(self._messages, tools=self._tools)
        return row + self._codec.decode_exactly(token_ids)


@dataclass(frozen=True)
class Turn:
    """The tokens of one turn and of the observation after it; the last turn may have none yet."""

    token_ids: list[int]
    observed: list[int]


@dataclass(frozen=True)
class Followed:
    """A completion after the environment has read a turn; ``None`` must start again."""

    generation: Generation | None
    is_over: bool


class Diverged(Exception):
    """A new environment made a different observation after the same turns."""


class Episodes:
    """What episodes share. ``templated``: the template may rewrite turns (``earlier_turns``)."""

    def __init__(
        self,
        pool: EnvironmentPool,
        codec: TextCodec,
        *,
        max_turns: int,
        templated: bool = False,
        stop_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self.pool, self.codec = pool, codec
        self.max_turns, self.vocab_size = max_turns, vocab_size
        self.templated = templated
        self.stop_token_ids = frozenset(stop_token_ids)
        self.num_steps = self.num_episodes = 0
        self.num_replayed = self.num_restarts = self.num_rewritten = 0
        self.step_seconds = 0.0

    def open(self, prompt: Prompt) -> "Episode":
        """The caller must close the episode."""
        self.num_episodes += 1
        return Episode(self, prompt)

    def metrics(self) -> dict[str, float]:
        failures = self.pool.limit.failures
        return {
            "environment/step_seconds": self.step_seconds / max(self.num_steps, 1),
            "environment/own_seconds": self.step_seconds / max(self.num_episodes, 1),
            "environment/failed_episodes": float(failures.total()),
            "environment/timeouts": float(failures["timeout"]),
            "environment/replayed_turns": float(self.num_replayed),
            "environment/restarted_completions": float(self.num_restarts),
            "environment/rewritten_contexts": float(self.num_rewritten),
        }


class Episode:
    def __init__(self, episodes: Episodes, prompt: Prompt) -> None:
        self._episodes, self._prompt = episodes, prompt
        self._num_stepped = 0
        self._num_lost = 0
        self._num_restarts = 0
        self._conversation = self._begin_conversation()
        # The environment is made while the model writes its first turn.
        self._opening = self._open()

    async def follow(self, whole: Generation, room_behind: Callable[[Generation], int]) -> Followed:
        """Makes the environment read the last turn of a completion.

        ``room_behind`` returns how many tokens may follow a completion. Raises EnvironmentFailed
        if this one cannot continue, and EnvironmentsFailing.
        """
        pool = self._episodes.pool
        try:
            followed = await self._follow(whole, room_behind)
        except Diverged:
            return Followed(self._restart(), is_over=False)
        except EnvironmentFailed as error:
            pool.limit.record_failure(error)
            raise
        if followed.is_over:
            pool.limit.record_success()
        return followed

    def close(self) -> None:
        """Ends the episode in the background."""
        opening = self._opening
        opening.cancel()
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    async def _follow(
        self, whole: Generation, room_behind: Callable[[Generation], int]
    ) -> Followed:
        episodes = self._episodes
        turns = turns_of(whole, episodes.stop_token_ids)
        observation, shown = await self._observe(turns)
        whole = _with_reward(whole, observation.reward)
        if observation.is_done:
            return Followed(whole, is_over=True)
        was_cut = whole.finish_reason == "length"
        longer = replace(whole, finish_reason="length")
        if shown.token_ids:
            version = whole.segments[-1].version
            observed = unsampled(shown.token_ids, version, begins_row=shown.begins_row)
            longer = joined(whole, observed)
        # An observation is left out if no turn can follow it.
        if was_cut or len(turns) >= episodes.max_turns or room_behind(longer) <= 0:
            whole = _with_reward(whole, await self._cut_off(turns))
            return Followed(replace(whole, finish_reason="length"), is_over=True)
        episodes.num_rewritten += shown.begins_row
        return Followed(longer, is_over=False)

    async def _observe(self, turns: list[Turn]) -> tuple[Observation, Shown]:
        """Makes the environment read the turns that it has not read; returns the last observation."""
        while True:
            try:
                remote = await self._opening
                while self._num_stepped < len(turns):
                    turn = turns[self._num_stepped]
                    observation, shown = await self._step(remote, turn)
                    self._num_stepped += 1
                    if self._num_stepped == len(turns):
                        return observation, shown
                    if observation.is_done or shown.token_ids != turn.observed:
                        raise Diverged
                    self._episodes.num_replayed += 1
            except WorkerLost as error:
                self._begin_again(error)
            else:  # the last turn ended with an unknown stop token
                raise Diverged

    async def _step(self, remote: RemoteEnvironment, turn: Turn) -> tuple[Observation, Shown]:
        episodes = self._episodes
        text = await asyncio.to_thread(episodes.codec.decode, turn.token_ids)
        started = time.monotonic()
        observation = await remote.step(text, turn.token_ids)
        episodes.step_seconds += time.monotonic() - started
        episodes.num_steps += 1
        return observation, await asyncio.to_thread(self._show, observation, turn, text)

    def _show(self, observation: Observation, turn: Turn, text: str) -> Shown:
        codec, vocab_size = self._episodes.codec, self._episodes.vocab_size
        shown = Shown(observation.token_ids or [])
        try:
            if observation.text is not None:
                ids = codec.encode_observation(
                    observation.text, has_special_tokens=observation.has_special_tokens
                )
                shown = Shown(ids)
            elif observation.messages is not None and not observation.is_done:
                if self._conversation is not None:
                    shown = self._conversation.reply(turn.token_ids, text, observation.messages)
                else:
                    reply = codec.reply_text(observation.messages, turn.token_ids)
                    shown = Shown(codec.encode_continuation(reply))
        except LeftOut:  # so would the next one be, and no rollout must be trained on without it
            raise
        except ValueError as error:
            raise EnvironmentFailed("bad observation", str(error)) from error
        ids = shown.token_ids
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise EnvironmentFailed(
                "bad observation",
                f"The token ids of an observation must be in [0, {vocab_size}), the model's "
                f"vocabulary, got {min(ids)} to {max(ids)}.",
            )
        if self._conversation is not None and observation.messages is None:
            self._conversation.insert(turn.token_ids, text, ids)
        return shown

    def _begin_conversation(self) -> Conversation | None:
        messages = self._prompt.text
        if not self._episodes.templated or isinstance(messages, str):
            return None
        return Conversation(self._episodes.codec, messages, tools_of(self._prompt.columns))

    async def _cut_off(self, turns: list[Turn]) -> float | None:
        while True:
            try:
                return await (await self._opening).cut_off()
            except WorkerLost as error:
                self._begin_again(error)
                await self._observe(turns)

    def _open(self) -> "asyncio.Task[RemoteEnvironment]":
        opening = asyncio.create_task(self._episodes.pool.open(self._prompt))
        # If the task is never awaited, the completion has already failed, so its error is ignored.
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return opening

    def _begin_again(self, error: WorkerLost) -> None:
        self._num_lost += 1
        if self._num_lost > _MAX_LOST:
            raise EnvironmentFailed(
                "crash", f"The worker processes of one episode have ended {self._num_lost} times."
            ) from error
        self._open_again()

    def _open_again(self) -> None:
        self.close()
        self._num_stepped = 0
        self._conversation = self._begin_conversation()
        self._opening = self._open()

    def _restart(self) -> None:
        """Starts the completion again, unless it has already been started again."""
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            error = EnvironmentFailed(
                "diverged",
                "New environments that were given the same prompt and the same turns made different "
                "observations each time.",
            )
            self._episodes.pool.limit.record_failure(error)
            raise error
        self._episodes.num_restarts += 1
        self._open_again()


def turns_of(generation: Generation, stop_token_ids: Collection[int]) -> list[Turn]:
    """The last turn may lack its stop token."""
    ids = generation.token_ids.tolist()
    sampled = [True] * len(ids) if generation.sampled is None else generation.sampled.tolist()
    turns: list[Turn] = []
    is_open = False
    for token, is_sampled in zip(ids, sampled, strict=True):
        if is_sampled:
            if not is_open:
                turns.append(Turn([], []))
            turns[-1].token_ids.append(token)
            is_open = token not in stop_token_ids
        else:
            turns[-1].observed.append(token)
            is_open = False
    return turns


def _with_reward(whole: Generation, reward: float | None) -> Generation:
    if reward is None:
        return whole
    total = (whole.environment_reward or 0.0) + reward
    if abs(total) > LARGEST_REWARD:
        message = (
            f"The rewards of an episode must add up to at most {LARGEST_REWARD:g}, got {total:g}."
        )
        raise EnvironmentFailed("bad reward", message)
    return replace(whole, environment_reward=total)
