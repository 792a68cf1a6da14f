# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Drives an episode between the model and an environment, which runs in a worker process.

The model is asked for a turn, by token ids. The environment reads the turn, and the model is asked
again, with the observation appended. If the worker process was lost, or after a resume, the model's
earlier turns are given to a new environment, until its observation differs from the earlier one. From
there on, the model generates its turns again.

A chat template may write earlier turns differently from the model, for example without their
thinking (``rollout.earlier_turns``). The context of the next turn then begins a new training
row, so that each turn is trained on with the context with which it was generated. `agents/rows.py` makes
the rows, and excludes from training what the model was shown.
"""

import asyncio
import itertools
import logging
import math
import sys
import time
from functools import partial
from typing import Any

import msgspec

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.environments import own_key
from torchtitan.grpo.rollout.agents.answering import EpisodeSettings
from torchtitan.grpo.rollout.agents.episode import AgentEpisode
from torchtitan.grpo.rollout.agents.exchange import ModelAnswer, ModelRequest
from torchtitan.grpo.rollout.agents.function_worker import Ended, LoadEnvironment
from torchtitan.grpo.rollout.agents.programs import REWARD, EpisodeWorkers, finite_number
from torchtitan.grpo.rollout.agents.transcript import Context, Message, Transcript
from torchtitan.grpo.rollout.chat_template import LeftOut, tools_of
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments.protocol import EnvironmentFailed, Observation
from torchtitan.grpo.rollout.tokenizer import TextTooLong
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, not_passed
from torchtitan.grpo.workers.host import Cancelled
from torchtitan.grpo.workers.pool import Worker
from torchtitan.grpo.workers.process import WorkerLost

logger = logging.getLogger(__name__)


class Environments:
    """The environments of a run's episodes. ``stop_strings`` are known after :meth:`start`.

    ``goes_on`` is True: an interrupted episode is played again up to where it was, and continues there.
    """

    own_seconds = start_seconds = math.inf  # each call has its own limit
    goes_on = True

    def __init__(self, config: RolloutProcessConfig, drops: DropLog, name: str = "") -> None:
        rollout = config.rollout
        assert rollout.environment is not None, "rollout.environment must be set"
        self.seconds = rollout.environment_timeout_seconds
        self.workers = EpisodeWorkers(
            LoadEnvironment(rollout.environment, rollout.environment_options),
            rollout.environment_workers,
            own_key(name, "rollout.environment"),
            rollout.environment,
            timeout_seconds=(self.seconds, "rollout.environment_timeout_seconds"),
            rollout=rollout,
            workers=config.workers,
            on_failure=drops.record_episode,
        )
        self.limit = self.workers.limit
        self.starting = asyncio.Semaphore(sys.maxsize)
        self.closing: set[asyncio.Task[None]] = set()

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.workers.loaded, Ended), "start() comes first"
        return self.workers.loaded.result

    async def start(self) -> None:
        await self.workers.start()

    async def close(self) -> None:
        closing = list(self.closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await self.workers.close()

    async def run(self, prompt: Prompt, episode: AgentEpisode) -> float | None:
        """Plays one episode, and returns the sum of its rewards, or None if there was none.

        Raises EnvironmentFailed, ServerError, or, if the episode may begin again, WorkerLost.
        """
        environment, reward = _RemoteEnvironment(self, prompt), None
        observer = Observer(episode.settings, prompt)
        try:
            asked = observer.first()
            while asked is not None:
                episode.note_request()
                (turn,) = (await episode.answer(asked)).choices
                await environment.opening
                started = time.monotonic()
                observation = await environment.step(turn.text, turn.token_ids)
                episode.counts["step_microseconds"] += round(1e6 * (time.monotonic() - started))
                reward = _added(reward, observation.reward)
                if observation.is_done:
                    return reward
                asked = await episode.in_thread(partial(observer.observe, turn, observation))
            episode.cut()
            return _added(reward, await environment.cut_off())
        finally:
            episode.counts["rewritten"] = observer.num_rewritten
            environment.close()

    def metrics(self, counts: dict[str, int]) -> dict[str, float]:
        step_seconds, failures = counts["step_microseconds"] / 1e6, self.limit.failures
        return {
            "environment/step_seconds": step_seconds / max(counts["requests"], 1),
            "environment/own_seconds": step_seconds / max(counts["episodes"], 1),
            "environment/failed_episodes": float(failures.total()),
            "environment/timeouts": float(failures["timeout"]),
            "environment/replayed_turns": float(counts["replayed"]),
            "environment/restarted_completions": float(counts["diverged"]),
            "environment/rewritten_contexts": float(counts["rewritten"]),
        }


class _RemoteEnvironment:
    """An environment in a worker process; see ``protocol.Environment``.

    A method raises EnvironmentFailed if the environment's method raises or times out, and WorkerLost if
    the process has ended. The task ``opening`` is the reset, which runs during the model's first turn.
    """

    _numbers = itertools.count()

    def __init__(self, owner: Environments, prompt: Prompt) -> None:
        self._owner, self._number = owner, next(self._numbers)
        self._worker: Worker[Ended | Cancelled] | None = None
        self._hangs = False
        self.opening = asyncio.create_task(self._open(prompt))
        # If the task is never awaited, the completion has already failed, so its error is ignored.
        self.opening.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        return msgspec.convert(
            await self._call("step", text=text, token_ids=token_ids), Observation
        )

    async def cut_off(self) -> float | None:
        return await self._call("cut_off")

    def close(self) -> None:
        """Closes the environment in the background."""
        task = asyncio.create_task(self._finish())
        self._owner.closing.add(task)
        task.add_done_callback(self._owner.closing.discard)

    async def _open(self, prompt: Prompt) -> None:
        self._worker = await self._owner.workers.enter()
        ids = prompt.token_ids.tolist()
        given = {"text": prompt.text, "token_ids": ids, "columns": prompt.columns}
        try:
            await self._call("reset", group_id=prompt.group_id, **given)
        except NotPlainData as error:
            message = not_passed(prompt, prompt.columns, "the environment", error)
            raise EnvironmentFailed("column", message) from error

    async def _finish(self) -> None:
        try:
            await asyncio.wait({self.opening})  # an environment is not closed amid its reset
        except asyncio.CancelledError:
            self.opening.cancel()
            raise
        worker, workers = self._worker, self._owner.workers
        if worker is None:
            return
        try:
            if not (self._hangs or worker.is_lost):  # a hanging thread would not answer
                await self._call("close")
        except (EnvironmentFailed, WorkerLost) as error:
            logger.warning("An environment was not closed: %s", error)
        finally:
            await workers.leave(worker)

    async def _call(self, method: str, **arguments: Any) -> Any:
        worker, workers, seconds = self._worker, self._owner.workers, self._owner.seconds
        assert worker is not None, "an environment is opened first"
        row = {"episode": self._number, "method": method, **arguments}
        try:
            async with asyncio.timeout(seconds):
                reply = await workers.run(worker, row, {})
        except TimeoutError as error:
            self._hangs = worker.is_retired = True  # a thread that hangs ends with its process
            raise EnvironmentFailed(
                "timeout",
                f"The environment's {method} took longer than "
                f"rollout.environment_timeout_seconds = {seconds:g}.",
            ) from error
        if isinstance(reply, Refused):
            kind = f"reset {reply.kind}" if method == "reset" else reply.kind
            raise EnvironmentFailed(kind, f"The environment's {method}: {reply.message}")
        return reply.result


def _added(total: float | None, reward: float | None) -> float | None:
    if reward is None:
        return total
    if finite_number(total := (total or 0.0) + reward) is None:
        text = f"The rewards of an episode must add up to {REWARD}, got {total:g}."
        raise EnvironmentFailed("bad reward", text)
    return total


class Observer:
    """Builds the contexts of an episode's turns. ``num_rewritten`` counts those that begin a new row."""

    def __init__(self, settings: EpisodeSettings, prompt: Prompt) -> None:
        rollout = settings.config.rollout
        self.num_rewritten = 0
        self._codec, self._vocab_size = settings.codec, settings.config.vocab_size
        self._row = prompt.token_ids.tolist()
        self._row_len = settings.sampling.max_total_tokens
        self._num_left, self._turns_left = settings.sampling.max_new_tokens, rollout.max_turns
        self._messages: list[Message] = [] if isinstance(prompt.text, str) else [*prompt.text]
        self._templated = bool(self._messages) and rollout.earlier_turns == "as_templated"
        self._transcript = Transcript(settings.codec, templated=self._templated)
        self._tools = tools_of(prompt.columns)
        self._context: Context | None = None
        # Of the assistant's message that the next turn continues.
        self._message_ids: list[int] = []
        self._message_text = ""

    def first(self) -> ModelRequest:
        return ModelRequest(token_ids=self._row, max_tokens=self._num_left, may_call=False)

    def observe(self, turn: ModelAnswer, observation: Observation) -> ModelRequest | None:
        """Returns the request for the next turn, or None if no turn can follow.

        Raises EnvironmentFailed if the observation cannot be added to the model's context.
        """
        self._turns_left -= 1
        try:
            shown = self._shown(turn, observation)
        except LeftOut:  # so would the next one be, and no rollout must be trained on without it
            raise
        except TextTooLong:
            return None
        except ValueError as error:
            raise EnvironmentFailed("bad observation", str(error)) from error
        row = [*self._row, *turn.token_ids]
        is_rewritten = shown[: len(row)] != row
        new = shown if is_rewritten else shown[len(row) :]
        if new and not (min(new) >= 0 and max(new) < self._vocab_size):
            raise EnvironmentFailed(
                "bad observation",
                f"The token ids of an observation must be in [0, {self._vocab_size}), the model's "
                f"vocabulary, got {min(new)} to {max(new)}.",
            )
        # A context that begins a row does not count as written.
        self._num_left -= len(turn.token_ids) + (0 if is_rewritten else len(new))
        self._row = shown
        room = min(self._num_left, self._row_len - len(shown))
        if turn.finish_reason == "length" or self._turns_left <= 0 or room <= 0:
            return None
        self.num_rewritten += is_rewritten
        return ModelRequest(token_ids=shown, max_tokens=room, may_call=False)

    def _shown(self, turn: ModelAnswer, observation: Observation) -> list[int]:
        """Returns the token ids of the next turn's whole context, which ends with the observation."""
        codec, text = self._codec, observation.text
        if observation.messages is None:
            ids = observation.token_ids or []
            if text is not None:
                has_special = observation.has_special_tokens
                ids = codec.encode_observation(text, has_special_tokens=has_special)
            if self._templated:
                self._message_text += turn.text + codec.decode_exactly(ids)
            self._message_ids += [*turn.token_ids, *ids]
            return [*self._row, *turn.token_ids, *ids]
        message = {"role": "assistant", "content": self._message_text + turn.text}
        context = self._context or self._first_context()
        written = self._transcript.turn(context, [*self._message_ids, *turn.token_ids])
        self._messages.append(message)
        context = self._transcript.context_behind(
            written, self._messages, observation.messages, self._tools
        )
        self._messages += observation.messages
        self._context, self._message_ids, self._message_text = context, [], ""
        return context.token_ids

    def _first_context(self) -> Context:
        num_prompt = len(self._row) - len(self._message_ids)
        text = ""
        if self._templated:
            text = self._codec.template.render(self._messages, tools=self._tools)
        return Context(self._row[:num_prompt], text)
