# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns the messages of a request into the tokens that the model is shown.

A program sends the whole conversation with each request. If this begins with an earlier conversation
of the episode, up to a message of the model, the tokens of that conversation are used again, and
only the rest is tokenized. So nothing that the model wrote is tokenized a second time. If the
program has rewritten a message, however, the chat template renders the whole conversation.

Messages are compared only by role, text and tool calls, because programs leave out other fields,
strip white space, and write the JSON of arguments anew, in some languages with ``1`` for ``1.0``.

Thinking is open if the chat template has opened it, or if the answer begins with a begin tag. The
first end tag ends it. Any later one is text of the answer. The state of an unfinished answer is the
end tag of its open thinking, an empty string if no thinking can follow any more, or None if nothing
was written yet, so that thinking may still begin.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan.grpo.rollout.tokenizer import TextCodec

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Context:
    """The model's input for one request: the conversation ``turn``, if there is one, and then ``text``.

    ``is_known``: whether the request continues an earlier conversation or repeats an earlier request.
    ``thinking`` is the state of the model's thinking, as described in the module's docstring.
    """

    token_ids: list[int]
    text: str = ""
    turn: "Turn | None" = None
    is_known: bool = False
    thinking: str | None = None


@dataclass(frozen=True)
class Turn:
    """A conversation that ends with a turn of the model.

    Only what follows the conversation ``before`` is stored here. An episode of many requests would
    otherwise store its first tokens once for each of them.
    """

    before: "Turn | None"
    own_ids: np.ndarray
    own_text: str
    is_cut: bool
    thinking: str | None

    def token_ids(self) -> list[int]:
        return np.concatenate([part.own_ids for part in self.parts()]).tolist()

    def rest_of(self, text: str) -> str | None:
        """Returns the rest of a text that begins with this conversation, or None if it does not."""
        place = 0
        for part in self.parts():
            if not text.startswith(part.own_text, place):
                return None
            place += len(part.own_text)
        return text[place:]

    def parts(self) -> list["Turn"]:
        """Follows the links ``before``, and returns the turns from the first to this one."""
        parts, part = [], self
        while part is not None:
            parts.append(part)
            part = part.before
        return parts[::-1]


class Transcript:
    """The conversations of one episode. ``templated``: ``rollout.earlier_turns`` is ``"as_templated"``."""

    def __init__(self, codec: TextCodec, *, templated: bool = False) -> None:
        self._codec, self._templated = codec, templated
        self._of_messages: dict[bytes, Turn] = {}
        self._asked: set[bytes] = set()
        self._of_text: list[Turn] = []

    def context(
        self, messages: Sequence[Message], tools: Tools = (), *, continues: bool = False
    ) -> Context:
        """Returns the context for the next message or, with ``continues``, for the rest of the last one.

        Raises ValueError if the chat template cannot render the messages.
        """
        digests = _digests(messages, tools)
        if continues and messages and messages[-1]["role"] == "assistant":
            turn = self._of_messages.get(digests[-1])
            if turn is not None and turn.is_cut:
                ids = turn.token_ids()
                return Context(ids, turn=turn, is_known=True, thinking=turn.thinking)
            text, begun = self._codec.unfinished_text(messages, tools), messages[-1]["content"]
            thinking = divided(begun, opened_by(text.removesuffix(begun)))[2]
            return replace(self._new(text), thinking=thinking)
        known_up_to = [n for n, digest in enumerate(digests, 1) if digest in self._of_messages]
        if known_up_to:
            number = known_up_to[-1]
            turn = self._of_messages[digests[number - 1]]
            return self.context_behind(turn, messages[:number], messages[number:], tools)
        is_known = digests[-1] in self._asked
        self._asked.add(digests[-1])
        return self._new(self._codec.template.render(messages, tools=tools), is_known=is_known)

    def context_behind(
        self, turn: Turn, messages: Sequence[Message], behind: Sequence[Message], tools: Tools = ()
    ) -> Context:
        """Returns the context for the model's answer to the messages ``behind``.

        They come after ``messages``, whose tokens are those of ``turn``. The context begins with these
        tokens if the template can render ``behind`` alone or, with ``templated``, if the template would
        still render the text of ``turn`` unchanged.
        """
        if not self._templated:
            last = turn.own_ids[-1:].tolist()
            with contextlib.suppress(ValueError):  # tool messages without the calls they answer
                return self._longer(self._codec.reply_text(behind, last, tools=tools), turn)
        text = self._codec.template.render([*messages, *behind], tools=tools)
        rest = turn.rest_of(text) if self._templated else None
        return self._new(text, is_known=True) if rest is None else self._longer(rest, turn)

    def text_context(self, text: str) -> Context:
        """Returns the context of a plain text, which may begin with an earlier text and its answer."""
        rests = [(rest, turn) for turn in self._of_text if (rest := turn.rest_of(text)) is not None]
        if rests:
            return self._longer(*min(rests, key=lambda pair: len(pair[0])))
        return Context(self._codec.encode(text), text)

    def add(
        self,
        messages: Sequence[Message] | None,
        tools: Tools,
        context: Context,
        turn_ids: list[int],
        *,
        is_cut: bool = False,
    ) -> None:
        """Records what the model wrote: the last of ``messages``, or the continuation of a plain text."""
        turn = self.turn(context, turn_ids, is_cut=is_cut)
        if messages is None:
            self._of_text.append(turn)
        else:
            self._of_messages[_digests(messages, tools)[-1]] = turn

    def turn(self, context: Context, turn_ids: list[int], *, is_cut: bool = False) -> Turn:
        """Returns the conversation that consists of a context and the tokens that the model wrote next."""
        written = self._codec.decode_exactly(turn_ids)
        num_before = sum(len(part.own_ids) for part in context.turn.parts()) if context.turn else 0
        return Turn(
            context.turn,
            np.array([*context.token_ids[num_before:], *turn_ids], np.int32),
            context.text + written,
            is_cut,
            divided(written, context.thinking)[2],
        )

    def _longer(self, rest: str, turn: Turn) -> Context:
        ids = [*turn.token_ids(), *self._codec.encode_continuation(rest)]
        return Context(ids, rest, turn, is_known=True, thinking=opened_by(rest))

    def _new(self, text: str, *, is_known: bool = False) -> Context:
        ids = self._codec.encode_continuation(text)
        return Context(ids, text, is_known=is_known, thinking=opened_by(text))


def _digests(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Returns a digest of each prefix of a conversation, computed from the `_meaning` of its messages."""
    running = hashlib.blake2b(
        json.dumps(list(tools), sort_keys=True, allow_nan=True).encode(), digest_size=16
    )
    found = []
    for message in messages:
        running.update(_meaning(message).encode() + b"\0")
        found.append(running.digest())
    return found


def _meaning(message: Message) -> str:
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or []
    ]
    calls = json.loads(json.dumps(calls, allow_nan=False), parse_int=_number, parse_float=_number)
    text = (message.get("content") or "").strip()
    # An answer belongs to its call, of which there may be several with equal results.
    answered = message.get("tool_call_id") if message["role"] == "tool" else None
    return json.dumps([message["role"], text, calls, answered], sort_keys=True, allow_nan=True)


def _number(text: str) -> float:
    """Parses any number as a float, because JavaScript and others do not tell ``1`` from ``1.0``."""
    return float(text) + 0.0  # not -0.0


_TAGS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
THINKING_MARKS = (*_TAGS, *_TAGS.values())


def opened_by(shown: str) -> str | None:
    """Returns the state of thinking at the start of the model's turn, after the rendered text ``shown``."""
    shown = shown.rstrip()
    if shown.endswith(tuple(_TAGS.values())):
        return ""  # the template has switched thinking off
    return next((end for begin, end in _TAGS.items() if shown.endswith(begin)), None)


def divided(written: str, state: str | None) -> tuple[str, str, str | None]:
    """Splits what the model wrote. Returns the thinking, the answer, and the state of thinking afterwards."""
    text = written.lstrip()
    for begin, end in _TAGS.items():
        if text.startswith(begin) and state in (None, end):
            text, state = text.removeprefix(begin), end
    if not state:
        return "", written, "" if text else state
    thinking, tag, answer = text.partition(state)
    return thinking.strip(), answer.lstrip("\n"), "" if tag else state
