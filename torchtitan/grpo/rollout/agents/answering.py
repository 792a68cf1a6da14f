# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Generates what the model writes after a context, and reads it as an answer.

`Answering` generates on the servers, in segments, up to a stop string. `AnswerReader` divides the
generated tokens into text, thinking, and tool calls.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.agents.exchange import BadRequest, ModelAnswer, ModelRequest
from torchtitan.grpo.rollout.agents.rows import part_of
from torchtitan.grpo.rollout.agents.tool_calls import CALL_MARKS, ParsedAnswer, Parser, ToolCall
from torchtitan.grpo.rollout.agents.transcript import THINKING_MARKS, Context, divided
from torchtitan.grpo.rollout.serving.dispatcher import Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import Places, next_server
from torchtitan.grpo.rollout.tokenizer import TextCodec, TextTooLong
from torchtitan.grpo.types import Generation, Prompt, joined

# Servers know only tokens, so an answer to a request with stop strings is written in segments, and looked
# through after each. They double from the first number to the second: each sends the whole context again,
# and what is written behind a stop string is lost.
_STOP_SEGMENTS = 64, 512


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings that all episodes of an `EpisodeWriter` share. ``counts`` go into the writer's metrics."""

    places: Places
    sampling: Sampling
    codec: TextCodec
    parser: Parser | None
    config: RolloutProcessConfig
    counts: Counter[str] = field(default_factory=Counter)


class Stop(NamedTuple):
    """A stop string that was found in the text of an answer, and the position at which it begins."""

    place: int
    text: str


FindStop = Callable[[Generation], tuple[Generation, Stop] | None]
"""Returns an answer that is cut behind its first stop string; None if it has none."""


class Answering:
    """Generates the answers of one completion.

    ``floor`` is the oldest policy version that may generate them. ``expected_tokens`` is the expected
    length of the whole completion, if the completion is a single conversation.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        prompt: Prompt,
        sample: int,
        floor: int,
        server: Server,
        expected_tokens: float | None = None,
    ) -> None:
        self._settings, self._prompt, self._sample = settings, prompt, sample
        self._floor, self._server, self._expected = floor, server, expected_tokens

    def sampling(self, asked: ModelRequest) -> Sampling:
        allowed = asked.sampling if self._settings.config.agent.allow_sampling else {}
        return replace(self._settings.sampling, **allowed)

    def is_own(self, asked: ModelRequest) -> bool:
        """Whether a request is sampled with the settings of ``[rollout]``, so its answer is trained on."""
        own = self._settings.sampling
        return replace(self.sampling(asked), seed=None) == replace(own, seed=None)

    def room(self, context_ids: list[int], asked: ModelRequest) -> int:
        """Returns how many tokens an answer may have.

        Raises BadRequest if the context is empty, and TextTooLong if it leaves no room for an answer.
        """
        sampling = self._settings.sampling
        num_shown, most = len(context_ids), sampling.max_total_tokens
        if not num_shown:
            raise BadRequest("A request must have at least one token.", param="prompt")
        if num_shown >= most:
            raise TextTooLong(most, f"{num_shown} tokens already")
        return min(most - num_shown, sampling.max_new_tokens, asked.max_tokens or most)

    async def generate(
        self,
        asked: ModelRequest,
        context_ids: list[int],
        room: int,
        number: int,
        find_stop: FindStop,
        *,
        begun: Generation | None = None,
        on_segment: Callable[[Generation], object] = lambda written: None,
    ) -> tuple[Generation, Stop | None]:
        """Returns an answer, and the stop string that ended it, or None.

        ``number`` is the number of the answer in its episode. ``begun`` is the part of the answer that
        is already written, perhaps all of it. ``on_segment`` is called with the answer so far.
        """
        written, wait_seconds = begun, self._settings.config.rollout.request_timeout_seconds
        while written is None or _is_open(written, room):
            self._server = await next_server(
                self._settings.places, self._floor, self._server.url, wait_seconds
            )
            written = joined(
                written, await self._segment(asked, context_ids, room, number, written)
            )
            on_segment(written)
            if asked.stop and (found := await asyncio.to_thread(find_stop, written)) is not None:
                return found
        return written, None

    def _segment(
        self,
        asked: ModelRequest,
        context_ids: list[int],
        room: int,
        number: int,
        written: Generation | None,
    ) -> asyncio.Task[Generation]:
        settings = self._settings
        num_written = 0 if written is None else len(written.token_ids)
        longest = settings.config.rollout.segment_tokens or room
        if asked.stop:
            first, most = _STOP_SEGMENTS
            longest = min(longest, max(first, min(num_written, most)))
        ids = context_ids if written is None else [*context_ids, *written.token_ids]
        expected = self._expected
        if expected is not None:
            expected = max(expected - (len(ids) - len(self._prompt.token_ids)), 1.0)
        sampling = self.sampling(asked).of_sample(self._prompt, self._sample, number, num_written)
        return settings.places.submit(
            replace(self._prompt, token_ids=np.array(ids, np.int32)),
            self._server,
            replace(sampling, max_new_tokens=min(longest, room - num_written)),
            expected_tokens=expected,
        )


def _is_open(written: Generation, room: int) -> bool:
    return written.finish_reason == "length" and len(written.token_ids) < room


# Ids of tool calls are of the length that every chat template accepts.
_CALL_ID_LEN = 9


@dataclass(frozen=True)
class AnswerReader:
    """Parses answers. ``parser`` finds tool calls, or is None if the chat template's format is unknown."""

    codec: TextCodec
    parser: Parser | None

    def read(
        self, asked: ModelRequest, context: Context, written: Generation, stop: Stop | None
    ) -> ModelAnswer:
        codec, parser = self.codec, self._parser(asked)
        ids = written.token_ids.tolist()
        text, reasoning = self._text(asked, ids), ""
        text = text[: stop.place] if stop is not None else text
        if asked.messages is not None:
            reasoning, text, _ = divided(text, context.thinking)
        parsed = ParsedAnswer(text, []) if parser is None else parser(text, asked.tools)
        is_cut = written.finish_reason == "length"
        shown = ids if asked.wants_logprobs else []
        return ModelAnswer(
            token_ids=ids,
            token_texts=[codec.decode_exactly([i]) for i in shown],
            token_bytes=[codec.token_bytes(i) for i in shown],
            logprobs=written.logprobs.tolist(),
            finish_reason="tool_calls" if parsed.calls and not is_cut else written.finish_reason,
            text=parsed.text,
            stop_reason=stop.text if stop is not None else None,
            reasoning=reasoning,
            calls=_with_ids(parsed.calls),
        )

    def find_stop(self, asked: ModelRequest, written: Generation) -> tuple[Generation, Stop] | None:
        """Cuts an answer after the token that completes the first stop string. None if there is none."""
        ids = written.token_ids.tolist()
        text = self._text(asked, ids)
        found = [Stop(place, one) for one in asked.stop if (place := text.find(one)) >= 0]
        if not found:
            return None
        first = min(found)
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            is_enough = self._text(asked, ids[:middle]).find(first.text) >= 0
            low, high = (low, middle) if is_enough else (middle + 1, high)
        return replace(part_of(written, 0, low), finish_reason="stop"), first

    def _text(self, asked: ModelRequest, ids: list[int]) -> str:
        """Decodes an answer, keeping the special tokens of thinking and tool calls if these are parsed."""
        marks = () if asked.messages is None else THINKING_MARKS
        marks += CALL_MARKS if self._parser(asked) else ()
        return self.codec.decode(ids, marks)

    def _parser(self, asked: ModelRequest) -> Parser | None:
        return self.parser if asked.tools and asked.may_call else None


def _with_ids(calls: list[ToolCall]) -> list[ToolCall]:
    """Keeps the ids that the model gave its calls if all have one and they differ, else makes new ones."""
    if len({call.id for call in calls} - {""}) == len(calls):
        return calls
    return [call._replace(id=secrets.token_hex(_CALL_ID_LEN)[:_CALL_ID_LEN]) for call in calls]
