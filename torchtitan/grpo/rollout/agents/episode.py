# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion that a program drives. An `AgentEpisode` answers the program's requests and keeps the rows."""

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torchtitan.grpo.rollout.agents.answering import Answering, AnswerReader, EpisodeSettings
from torchtitan.grpo.rollout.agents.exchange import (
    Answer,
    BadRequest,
    ModelAnswer,
    ModelRequest,
    read_messages,
)
from torchtitan.grpo.rollout.agents.programs import MODEL, REWARD, finite_number
from torchtitan.grpo.rollout.agents.rows import EpisodeRows, Replay, Row
from torchtitan.grpo.rollout.agents.transcript import Context, Message, Transcript
from torchtitan.grpo.rollout.serving.dispatcher import Server
from torchtitan.grpo.rollout.tokenizer import TextTooLong
from torchtitan.grpo.types import Generation, Prompt, as_context

# Requests of one episode that are read and tokenized at once: other episodes need threads as well.
_MOST_READ = 2

_Found = TypeVar("_Found")

_numbers = itertools.count()


class AgentEpisode:
    """One episode of a program. ``floor`` is the oldest policy version that may answer the program.

    The future ``asked`` is done at the program's first request. The future ``failed`` gets the error
    if no server answers, after which the program need not go on.

    The last three arguments are only for episodes that send one request at a time: ``begun`` is what
    an interrupted episode of this completion wrote, ``on_progress`` is called with the completion so
    far, and ``expected_tokens`` is the expected length of the completion.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        prompt: Prompt,
        sample: int,
        floor: int,
        server: Server,
        *,
        begun: Generation | None = None,
        on_progress: Callable[[Generation], object] | None = None,
        expected_tokens: float | None = None,
    ) -> None:
        self.name = f"{prompt.group_id}-{sample}-{next(_numbers)}"
        self.key = secrets.token_urlsafe(24)
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()
        self.reward: float | None = None
        self.counts: Counter[str] = Counter()
        self.conversations: dict[str, list[Message]] = {}
        self.settings = settings
        prompt_ids = prompt.token_ids.tolist()
        stop_ids = settings.sampling.stop_token_ids
        self._replay = None if begun is None else Replay(prompt_ids, begun, stop_ids)
        self._on_progress = on_progress
        self._answering = Answering(settings, prompt, sample, floor, server, expected_tokens)
        self._reader = AnswerReader(settings.codec, settings.parser)
        self._rows = EpisodeRows(prompt_ids)
        templated = settings.config.rollout.earlier_turns == "as_templated"
        self._transcript = Transcript(settings.codec, templated=templated)
        self._num_asked = 0
        self._reading = asyncio.Semaphore(_MOST_READ)
        self._writing: set[asyncio.Task[tuple[ModelAnswer, Generation]]] = set()
        self._answers = itertools.count()
        self._rows_of: dict[str, list[Row]] = {}
        self._num_in_flight = 0
        self.start_seconds = self._own_seconds = 0.0
        self._since = time.monotonic()
        self._is_closed = False
        self._hold = ExitStack()
        # A program may take long to ask, and an environment's episode asks at once.
        self._hold.enter_context(settings.places.hold(server if on_progress else None))

    def begin(self) -> None:
        """Notes that the program starts."""
        self._since = time.monotonic()

    def note_request(self) -> None:
        if not self.asked.done():
            self.start_seconds = self.own_seconds()
            self._since = time.monotonic()
            self.asked.set_result(None)

    def own_seconds(self) -> float:
        """Returns the program's own seconds before its first request, or after it while no request ran."""
        running = 0.0 if self._num_in_flight else time.monotonic() - self._since
        return self._own_seconds + running

    def close(self) -> None:
        """Cancels the requests. The episode no longer counts as a completion in flight."""
        self._is_closed = True
        for task in self._writing:
            task.cancel()
        self._hold.close()
        self.asked.cancel()
        self.failed.cancel()

    # -- its completion ---------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    def whole(self) -> Generation | None:
        """The completion so far, or ``None`` if no request was answered."""
        return self._rows.whole(self.reward)

    def cut(self) -> None:
        """Notes that the completion ends at a limit, and not by itself."""
        self._rows.cut()

    def reward_rows(self, response_id: str, reward: float) -> None:
        """Gives the rows of one answer a reward of their own.

        Raises BadRequest if there is no such answer, or if another answer in the same row has a reward.
        """
        answer = response_id.replace("_", "-").partition("-")[2]
        rows = self._rows_of.get(answer)
        if not rows:
            raise BadRequest(
                f"response_id must be the id of an answer of this episode, got {response_id!r:.100}.",
                param="response_id",
            )
        if any(row.rewarded not in ("", answer) for row in rows):
            raise BadRequest(
                f"The answer {response_id!r:.100} must not share its row with an answer that has a reward: "
                "a request that sends back a whole conversation continues its row, which has one reward. "
                "Send it once, for one of the answers.",
                param="response_id",
            )
        for row in rows:
            row.reward, row.rewarded = reward, answer

    # -- its requests -----------------------------------------------------------------

    async def answer(self, asked: ModelRequest) -> Answer:
        """Answers a request. Raises BadRequest, or ServerError (which ends the episode) if no server answers."""
        try:
            if asked.token_ids is None:
                context = await self.in_thread(lambda: self._context(asked))
            else:
                context = self._given(asked.token_ids)
            room = self._answering.room(context.token_ids, asked)
        except BadRequest:
            raise
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TextTooLong) else None
            raise BadRequest(str(error), param="messages", code=code) from error
        if self._is_closed:
            raise BadRequest("The episode has ended.", code="ended")
        most = self.settings.config.rollout.max_turns
        if self._num_asked + asked.number > most:
            raise BadRequest(
                f"An episode may ask for at most rollout.max_turns = {most} answers, and has asked for "
                f"{self._num_asked}. Let the program end earlier, or raise rollout.max_turns.",
                code="max_turns",
            )
        first, self._num_asked = self._num_asked, self._num_asked + asked.number
        self.counts["requests"] += asked.number
        self.counts["conversations"] += not context.is_known
        self.settings.counts["ignored"] += bool(self.ignored(asked))
        with self._generating():
            choices, rows = await self._choices(asked, context, room, first)
        number = f"{self.name}-{next(self._answers)}"
        self._rows_of[number] = rows
        return Answer(number, int(time.time()), MODEL, context.token_ids, choices)

    async def in_thread(self, read: Callable[[], _Found]) -> _Found:
        """Calls ``read`` in a thread. At most two calls run at once, even if their clients have left."""
        await self._reading.acquire()
        work = asyncio.get_running_loop().run_in_executor(None, read)
        work.add_done_callback(lambda _: self._reading.release())
        work.add_done_callback(lambda work: work.cancelled() or work.exception())  # it is retrieved
        return await asyncio.shield(work)

    def ignored(self, asked: ModelRequest) -> tuple[str, ...]:
        """Returns the names of the request's parameters that are ignored."""
        allowed = self.settings.config.agent.allow_sampling
        return asked.ignored + (() if allowed else tuple(asked.sampling))

    async def _choices(
        self, asked: ModelRequest, context: Context, room: int, first: int
    ) -> tuple[list[ModelAnswer], list[Row]]:
        """Generates the answers to a request. Keeps none if the client leaves before the last is done."""
        rows = [self._rows.place(context.token_ids) for _ in range(asked.number)]
        tasks = [
            asyncio.create_task(self._write(asked, context, room, first + i, row))
            for i, row in enumerate(rows)
        ]
        self._writing.update(tasks)
        try:
            written = await asyncio.gather(*tasks)
            is_own = self._answering.is_own(asked)
            for row, (choice, part) in zip(rows, written, strict=True):
                self.settings.counts["masked"] += not is_own
                self._rows.add(row, context.token_ids, part if is_own else as_context(part))
                self._note(asked, context, choice)
            return [choice for choice, _ in written], rows
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
                self.failed.exception()  # in case the program has just ended
            raise
        finally:
            for task in tasks:
                task.cancel()  # the others, if one has failed
            self._writing.difference_update(tasks)
            for row in rows:
                self._rows.release(row)

    async def _write(
        self, asked: ModelRequest, context: Context, room: int, number: int, row: Row
    ) -> tuple[ModelAnswer, Generation]:
        """Generates one answer. ``number`` is the number of the answer in the episode."""
        written, stop = await self._answering.generate(
            asked,
            context.token_ids,
            room,
            number,
            partial(self._reader.find_stop, asked),
            begun=self._replayed(context.token_ids),
            on_segment=partial(self._progressed, row, context.token_ids),
        )
        # In a thread: long answers take milliseconds to decode.
        return await asyncio.to_thread(self._reader.read, asked, context, written, stop), written

    def _replayed(self, context_ids: list[int]) -> Generation | None:
        if self._replay is None:
            return None
        found, before = self._replay.answer(context_ids), self.counts["diverged"]
        self.counts["replayed"] += found is not None
        self.counts["diverged"] = max(before, int(self._replay.has_diverged))
        return found

    def _progressed(self, row: Row, context_ids: list[int], part: Generation) -> None:
        if self._on_progress is not None:
            self._on_progress(self._rows.with_part(row, context_ids, part))

    def _given(self, token_ids: list[int]) -> Context:
        largest, vocab_size = max(token_ids), self.settings.config.vocab_size
        if largest >= vocab_size:
            raise BadRequest(
                f"Token ids must be below {vocab_size}, the model's vocab_size, got {largest}.",
                param="token_ids",
            )
        return Context(token_ids, "", is_known=True)

    def _context(self, asked: ModelRequest) -> Context:
        if asked.text is not None:
            return self._transcript.text_context(asked.text)
        assert asked.messages is not None, "one of the three is given"
        if len(asked.messages) > (most := self.settings.sampling.max_total_tokens):
            raise TextTooLong(most, f"{len(asked.messages)} messages")
        if asked.tools and asked.may_call and self.settings.parser is None:
            raise BadRequest(
                "The model's chat template must print tools and their calls in a known form, but it "
                "does not. Describe the tools in a message, and read the calls from the text.",
                param="tools",
            )
        return self._transcript.context(asked.messages, asked.tools, continues=asked.continues)

    def _note(self, asked: ModelRequest, context: Context, choice: ModelAnswer) -> None:
        """Adds a conversation and its answer to the transcript, as later requests may begin with them."""
        ids = choice.token_ids
        if asked.token_ids is not None:
            return
        if asked.messages is None:
            # The text that the program has seen lacks the token that ended it.
            is_ended = ids[-1] in self.settings.sampling.stop_token_ids
            self._transcript.add(None, (), context, ids[:-1] if is_ended else ids)
            return
        before = list(asked.messages)
        (message,) = read_messages([choice.message()])
        if asked.continues and before[-1]["role"] == "assistant":
            message["content"] = before.pop()["content"] + choice.text
        is_cut = choice.finish_reason == "length"
        self._transcript.add([*before, message], asked.tools, context, ids, is_cut=is_cut)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Releases the episode's slot while requests run, because each request takes a slot of its own."""
        if self._num_in_flight == 0:
            self._own_seconds += time.monotonic() - self._since
            self._hold.close()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._since = time.monotonic()
                if not self._is_closed:
                    self._hold.enter_context(self.settings.places.hold())


def parsed_reward(body: Any) -> float:
    """Returns the reward in the body of a reward request. Raises BadRequest if it is not valid."""
    value = body.get("reward")
    if isinstance(value, bool) or (reward := finite_number(value)) is None:
        raise BadRequest(f"reward must be {REWARD}, got {value!r:.100}.", param="reward")
    return reward
