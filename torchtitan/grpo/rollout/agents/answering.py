# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a context to what the model writes behind it: places on servers, segments and stop strings."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.agents.exchange import BadRequest, ModelRequest
from torchtitan.grpo.rollout.agents.tool_calls import Parser
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
    """What the episodes of one writer share. ``counts`` are those of its metrics."""

    places: Places
    sampling: Sampling
    codec: TextCodec
    parser: Parser | None
    config: RolloutProcessConfig
    counts: Counter[str] = field(default_factory=Counter)


class Stop(NamedTuple):
    """A stop string, and where it begins in the text of an answer."""

    place: int
    text: str


FindStop = Callable[[Generation], tuple[Generation, Stop] | None]
"""Returns an answer that is cut behind its first stop string; None if it has none."""


class Answering:
    """Writes the answers of one completion. ``floor`` is the oldest version that may write them.

    ``expected_tokens`` are those of the whole completion, if it is one conversation.
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
        """Whether a request is sampled as ``[rollout]`` says, so that its answer is trained."""
        own = self._settings.sampling
        return replace(self.sampling(asked), seed=None) == replace(own, seed=None)

    def room(self, context_ids: list[int], asked: ModelRequest) -> int:
        """The number of tokens that an answer may have; raises BadRequest, and TextTooLong."""
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
        """Returns the answer of this number in the episode, and the stop string that ended it.

        ``begun`` is its beginning, or the whole. ``on_segment`` is called with what is written so far.
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
