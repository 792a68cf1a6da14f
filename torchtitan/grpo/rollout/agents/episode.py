# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One completion that a program drives: answers its requests, and keeps the rows that result."""

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.agents.exchange import (
    Answer,
    BadRequest,
    ModelAnswer,
    ModelRequest,
    read_messages,
)
from torchtitan.grpo.rollout.agents.programs import MODEL, REWARD, finite_number
from torchtitan.grpo.rollout.agents.rows import EpisodeRows, Row
from torchtitan.grpo.rollout.agents.thinking import THINKING_MARKS, divided
from torchtitan.grpo.rollout.agents.tool_calls import CALL_MARKS, Parser, Spoken, ToolCall
from torchtitan.grpo.rollout.agents.transcript import Context, Message, Transcript
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.rollout.serving.waiting import next_server
from torchtitan.grpo.rollout.tokenizer import TextCodec, TextTooLong
from torchtitan.grpo.types import Generation, Prompt, as_context, joined

# Servers know only tokens, so an answer to a request with stop strings is written in segments, and looked
# through after each. They double from the first number to the second: each sends the whole context again,
# and what is written behind a stop string is lost.
_STOP_SEGMENTS = 64, 512
# Ids of tool calls are of the length that every chat template accepts.
_CALL_ID_LEN = 9
# Requests of one episode that are read and tokenized at once: other episodes need threads as well.
_MOST_READ = 2

_Found = TypeVar("_Found")

_numbers = itertools.count()


class _Stop(NamedTuple):
    """A stop string, and where it begins in the text of an answer."""

    place: int
    text: str


@dataclass(frozen=True)
class EpisodeSettings:
    """What the episodes of one writer share. ``counts`` are those of its metrics."""

    places: Dispatcher | SpareSlots
    sampling: Sampling
    codec: TextCodec
    parser: Parser | None
    config: RolloutProcessConfig
    counts: Counter[str] = field(default_factory=Counter)


class AgentEpisode:
    """``floor`` is the oldest version that may write for it.

    ``asked`` is done at its first request, from which on its own time counts. ``failed`` is done
    with an error if no server answers: the program need not go on.
    """

    def __init__(
        self, settings: EpisodeSettings, prompt: Prompt, sample: int, floor: int, server: Server
    ) -> None:
        self.name = f"{prompt.group_id}-{sample}-{next(_numbers)}"
        self.key = secrets.token_urlsafe(24)
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()
        self.reward: float | None = None
        self.counts: Counter[str] = Counter()
        self.conversations: dict[str, list[Message]] = {}
        self._settings, self._prompt, self._sample = settings, prompt, sample
        self._floor, self._server = floor, server
        self._rows = EpisodeRows(prompt.token_ids.tolist())
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
        self._hold.enter_context(settings.places.hold())

    def begin(self) -> None:
        """The program starts."""
        self._since = time.monotonic()

    def note_request(self) -> None:
        if not self.asked.done():
            self.start_seconds = self.own_seconds()
            self._since = time.monotonic()
            self.asked.set_result(None)

    def own_seconds(self) -> float:
        """The program's own time until its first request, and from then on that beside the model's."""
        running = 0.0 if self._num_in_flight else time.monotonic() - self._since
        return self._own_seconds + running

    def close(self) -> None:
        """Cancels its requests, and ends its place among the completions in flight."""
        self._is_closed = True
        for task in self._writing:
            task.cancel()
        self._hold.close()
        self.asked.cancel()
        self.failed.cancel()

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    def whole(self) -> Generation | None:
        """The completion so far; ``None`` if no request was answered."""
        return self._rows.whole(self.reward)

    def reward_rows(self, response_id: str, reward: float) -> None:
        """Gives the rows of one answer a reward of their own.

        Raises BadRequest if there is no such answer, or another one of the same row has a reward.
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

    async def answer(self, asked: ModelRequest) -> Answer:
        """Raises BadRequest, and ServerError if no server answers, which also ends the episode."""
        try:
            context = await self.in_thread(lambda: self._context(asked))
            room = self._room(context, asked)
        except BadRequest:
            raise
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TextTooLong) else None
            raise BadRequest(str(error), param="messages", code=code) from error
        if self._is_closed:
            raise BadRequest("The episode has ended.", code="ended")
        most = self._settings.config.rollout.max_turns
        if self._num_asked + asked.number > most:
            raise BadRequest(
                f"An episode may ask for at most rollout.max_turns = {most} answers, and has asked for "
                f"{self._num_asked}. Let the program end earlier, or raise rollout.max_turns.",
                code="max_turns",
            )
        first, self._num_asked = self._num_asked, self._num_asked + asked.number
        self.counts["requests"] += asked.number
        self.counts["conversations"] += not context.is_known
        self._settings.counts["ignored"] += bool(self.ignored(asked))
        with self._generating():
            choices, rows = await self._choices(asked, context, room, first)
        number = f"{self.name}-{next(self._answers)}"
        self._rows_of[number] = rows
        return Answer(number, int(time.time()), MODEL, context.token_ids, choices)

    async def in_thread(self, read: Callable[[], _Found]) -> _Found:
        """Calls what takes long for a long request. The place of a client that left is kept as well."""
        await self._reading.acquire()
        work = asyncio.get_running_loop().run_in_executor(None, read)
        work.add_done_callback(lambda _: self._reading.release())
        work.add_done_callback(lambda work: work.cancelled() or work.exception())  # it is retrieved
        return await asyncio.shield(work)

    async def _choices(
        self, asked: ModelRequest, context: Context, room: int, first: int
    ) -> tuple[list[ModelAnswer], list[Row]]:
        """Keeps all answers of a request, or none: the client may leave before the last one."""
        rows = [self._rows.place(context.token_ids) for _ in range(asked.number)]
        tasks = [
            asyncio.create_task(self._write(asked, context, room, first + i))
            for i in range(asked.number)
        ]
        self._writing.update(tasks)
        try:
            written = await asyncio.gather(*tasks)
            own, sampling = self._settings.sampling, self._sampling(asked)
            is_own = replace(sampling, seed=None) == replace(own, seed=None)
            for row, (choice, part) in zip(rows, written, strict=True):
                self._settings.counts["masked"] += not is_own
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

    def _context(self, asked: ModelRequest) -> Context:
        if asked.token_ids is not None:
            largest, vocab_size = max(asked.token_ids), self._settings.config.vocab_size
            if largest >= vocab_size:
                raise BadRequest(
                    f"Token ids must be below {vocab_size}, the model's vocab_size, got {largest}.",
                    param="token_ids",
                )
            return Context(asked.token_ids, "", is_known=True)
        if asked.text is not None:
            return self._transcript.text_context(asked.text)
        assert asked.messages is not None, "one of the three is given"
        if len(asked.messages) > (most := self._settings.sampling.max_total_tokens):
            raise TextTooLong(most, f"{len(asked.messages)} messages")
        if asked.tools and asked.may_call and self._settings.parser is None:
            raise BadRequest(
                "The model's chat template must print tools and their calls in a known form, but it "
                "does not. Describe the tools in a message, and read the calls from the text.",
                param="tools",
            )
        return self._transcript.context(asked.messages, asked.tools, continues=asked.continues)

    def _room(self, context: Context, asked: ModelRequest) -> int:
        """The number of tokens that an answer may have."""
        sampling = self._settings.sampling
        num_shown, most = len(context.token_ids), sampling.max_total_tokens
        if not num_shown:
            raise BadRequest("A request must have at least one token.", param="prompt")
        if num_shown >= most:
            raise TextTooLong(most, f"{num_shown} tokens already")
        return min(most - num_shown, sampling.max_new_tokens, asked.max_tokens or most)

    def ignored(self, asked: ModelRequest) -> tuple[str, ...]:
        """Names of what a request asks for and does not get."""
        allowed = self._settings.config.agent.allow_sampling
        return asked.ignored + (() if allowed else tuple(asked.sampling))

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Requests in flight take the place that the episode holds between them."""
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
                    self._hold.enter_context(self._settings.places.hold())

    async def _write(
        self, asked: ModelRequest, context: Context, room: int, number: int
    ) -> tuple[ModelAnswer, Generation]:
        """Writes the answer of this number in the episode."""
        written, stopped = await self._generate(asked, context, room, number)
        # In a thread: long answers take milliseconds to decode.
        return await asyncio.to_thread(self._choice, asked, context, written, stopped), written

    async def _generate(
        self, asked: ModelRequest, context: Context, room: int, number: int
    ) -> tuple[Generation, _Stop | None]:
        """Returns an answer, and the stop string that ended it."""
        settings, rollout = self._settings, self._settings.config.rollout
        written: Generation | None = None
        while True:
            num_written = 0 if written is None else len(written.token_ids)
            longest = rollout.segment_tokens or room
            if asked.stop:
                first, most = _STOP_SEGMENTS
                longest = min(longest, max(first, min(num_written, most)))
            self._server = server = await next_server(
                settings.places, self._floor, self._server.url, rollout.request_timeout_seconds
            )
            sampling = self._sampling(asked).of_sample(
                self._prompt, self._sample, number, num_written
            )
            ids = context.token_ids if written is None else [*context.token_ids, *written.token_ids]
            part = await settings.places.submit(
                replace(self._prompt, token_ids=np.array(ids, np.int32)),
                server,
                replace(sampling, max_new_tokens=min(longest, room - num_written)),
            )
            written = joined(written, part)
            if asked.stop:
                found = await asyncio.to_thread(self._stopped, asked, written)
                if found is not None:
                    return found
            if written.finish_reason != "length" or len(written.token_ids) >= room:
                return written, None

    def _stopped(self, asked: ModelRequest, written: Generation) -> tuple[Generation, _Stop] | None:
        """Cuts an answer behind the token that completes the first stop string in its text."""
        ids = written.token_ids.tolist()
        text = self._text(asked, ids)
        found = [_Stop(place, one) for one in asked.stop if (place := text.find(one)) >= 0]
        if not found:
            return None
        first = min(found)
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            is_enough = self._text(asked, ids[:middle]).find(first.text) >= 0
            low, high = (low, middle) if is_enough else (middle + 1, high)
        return replace(_beginning(written, low), finish_reason="stop"), first

    def _sampling(self, asked: ModelRequest) -> Sampling:
        allowed = asked.sampling if self._settings.config.agent.allow_sampling else {}
        return replace(self._settings.sampling, **allowed)

    def _text(self, asked: ModelRequest, ids: list[int]) -> str:
        """The text of an answer, with the special tokens that divide it, if they may."""
        marks = () if asked.messages is None else THINKING_MARKS
        marks += CALL_MARKS if self._parser(asked) else ()
        return self._settings.codec.decode(ids, marks)

    def _parser(self, asked: ModelRequest) -> Parser | None:
        return self._settings.parser if asked.tools and asked.may_call else None

    def _choice(
        self, asked: ModelRequest, context: Context, written: Generation, stopped: _Stop | None
    ) -> ModelAnswer:
        codec, parser = self._settings.codec, self._parser(asked)
        ids = written.token_ids.tolist()
        text, reasoning = self._text(asked, ids), ""
        text = text[: stopped.place] if stopped is not None else text
        if asked.messages is not None:
            reasoning, text, _ = divided(text, context.thinking)
        spoken = Spoken(text, []) if parser is None else parser(text, asked.tools)
        is_cut = written.finish_reason == "length"
        shown = ids if asked.wants_logprobs else []
        return ModelAnswer(
            token_ids=ids,
            token_texts=[codec.decode_exactly([i]) for i in shown],
            token_bytes=[codec.token_bytes(i) for i in shown],
            logprobs=written.logprobs.tolist(),
            finish_reason="tool_calls" if spoken.calls and not is_cut else written.finish_reason,
            text=spoken.text,
            stop_reason=stopped.text if stopped is not None else None,
            reasoning=reasoning,
            calls=_with_ids(spoken.calls),
        )

    def _note(self, asked: ModelRequest, context: Context, choice: ModelAnswer) -> None:
        """Adds the answer to what later requests may begin with."""
        ids = choice.token_ids
        if asked.token_ids is not None:
            return
        if asked.messages is None:
            # The text that the program has seen lacks the token that ended it.
            is_ended = ids[-1] in self._settings.sampling.stop_token_ids
            self._transcript.add(None, (), context, ids[:-1] if is_ended else ids)
            return
        before = list(asked.messages)
        (message,) = read_messages([choice.message()])
        if asked.continues and before[-1]["role"] == "assistant":
            message["content"] = before.pop()["content"] + choice.text
        is_cut = choice.finish_reason == "length"
        self._transcript.add([*before, message], asked.tools, context, ids, is_cut=is_cut)


def _beginning(written: Generation, num_tokens: int) -> Generation:
    """The first tokens of an answer."""
    segments = [
        segment._replace(end=min(segment.end, num_tokens))
        for segment in written.segments
        if segment.start < num_tokens
    ]
    return replace(
        written,
        token_ids=written.token_ids[:num_tokens],
        logprobs=written.logprobs[:num_tokens],
        segments=tuple(segments),
    )


def _with_ids(calls: list[ToolCall]) -> list[ToolCall]:
    """Keeps ids that the model wrote, if each is another one: it reads them beside results."""
    if len({call.id for call in calls} - {""}) == len(calls):
        return calls
    return [call._replace(id=secrets.token_hex(_CALL_ID_LEN)[:_CALL_ID_LEN]) for call in calls]


def parsed_reward(body: Any) -> float:
    """Reads the body of a reward; raises BadRequest."""
    value = body.get("reward")
    if isinstance(value, bool) or (reward := finite_number(value)) is None:
        raise BadRequest(f"reward must be {REWARD}, got {value!r:.100}.", param="reward")
    return reward
