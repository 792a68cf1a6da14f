# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds the assistant's turns in a conversation that the chat template has rendered as a whole.

    <user>2 + 3?<end><assistant><think>..</think>5<end><user>..
          b     e               [    learned         ] b

The conversation is rendered a second time with marks in it, which show where the texts of the other
messages begin (b) and end (e). A turn begins where a prompt with the messages before it would end. The
turn ends with the last end-of-turn token before the next b. A turn may differ from what the model once
wrote, because templates leave out the thinking of earlier turns.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, takewhile
from typing import Any, NamedTuple

from torchtitan.grpo.rollout.tokenizer import TextCodec

Messages = Sequence[dict[str, Any]]
_EDGE = re.compile(r"qzv(\d+[be])q")
_SWITCHES = ("weight", "train", "training")  # with which users of other trainers exclude messages
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Turns(NamedTuple):
    """``is_learned`` marks the assistant's tokens. ``left_out`` names what the template omits of turns."""

    token_ids: list[int]
    is_learned: list[bool]
    left_out: set[str]


class TurnFinder:
    """Finds the assistant's turns in conversations. ``end_ids`` are the tokens that end a turn."""

    def __init__(self, codec: TextCodec, end_ids: Sequence[int]) -> None:
        self._codec, self._end_ids = codec, frozenset(end_ids)
        self._openings: dict[str, str] = {}

    def find(self, messages: Messages, tools: Messages = (), first: int = 0) -> Turns:
        """Finds the turns from message ``first`` on. Raises ValueError if the template does not allow it."""
        text = self._codec.template.render(messages, opens_turn=False, tools=tools)
        unmarked, edges = self._rendered(messages, tools)
        if unmarked != text:
            raise ValueError(
                "the chat template must print the text of each message as it is, so that the "
                "assistant's turns can be found. Write each turn into a row of its own, with its text "
                "in a column (sft.completion_column)."
            )
        runs, places, left_out = list(_runs(messages, first)), [], set[str]()
        for begin, end in runs:
            before, behind = edges[f"{begin - 1}e"], edges.get(f"{end}b", len(text))
            opening = self._opening(messages[:begin], tools)
            space = _core(messages[begin - 1])[2]  # a template may strip it
            begins = (before, before + len(space)) if text.startswith(space, before) else (before,)
            start = max(place + self._num_opened(text[place:], opening) for place in begins)
            left_out.update(_left_out(messages[begin:end], text[start:behind]))
            places += [start, behind]
        ids, found = self._codec.encode_to(text, places)
        is_learned = [False] * len(ids)
        for (begin, end), start, behind in zip(runs, found[::2], found[1::2], strict=True):
            ends = [i + 1 for i in range(start, behind) if ids[i] in self._end_ids]
            if not ends:  # the template writes it only if the conversation ends here, or never
                left_out.add("the end of a turn")
                alone, edges_alone = self._rendered(messages[:end], tools)
                behind_prompt = text[edges[f"{begin - 1}e"] : edges.get(f"{end}b", len(text))]
                shared = _num_shared(behind_prompt, alone[edges_alone[f"{begin - 1}e"] :])
                stop = edges.get(f"{end - 1}e", edges[f"{begin - 1}e"] + shared)
                _, ends = self._codec.encode_to(text, (stop,))
            is_learned[start : ends[-1]] = [True] * (ends[-1] - start)
        return Turns(ids, is_learned, left_out)

    def _opening(self, messages: Messages, tools: Messages) -> str:
        """Returns what a prompt has after its last message's text. It depends only on the message's role."""
        *before, last = messages
        if last["role"] not in self._openings:
            stripped = [*before, last | {"content": _core(last)[1]}]
            text, edges = self._rendered(stripped, tools, opens_turn=True)
            self._openings[last["role"]] = text[edges[f"{len(before)}e"] :]
        return self._openings[last["role"]]

    def _num_opened(self, text: str, opening: str) -> int:
        """Returns the length of the common prefix of text and opening, in whole words and special tokens."""
        number = _num_shared(text, opening)
        if number == len(opening):
            return number
        words = re.finditer(rf"{self._codec.special.pattern}|\s", opening[:number])
        return max((word.end() for word in words), default=0)

    def _rendered(
        self, messages: Messages, tools: Messages, *, opens_turn: bool = False
    ) -> tuple[str, dict[str, int]]:
        """Returns the rendered text, and where in it the texts of messages begin (key "2b") and end ("2e").

        The begin is not known for the assistant's messages, as thinking may precede their text, and the
        end is not known for those of them that are empty or have tool calls.
        """
        marked = [_marked(message, number) for number, message in enumerate(messages)]
        text = self._codec.template.render(marked, opens_turn=opens_turn, tools=tools)
        parts = _EDGE.split(text)
        places = accumulate(len(part) for part in parts[::2])
        return "".join(parts[::2]), dict(zip(parts[1::2], places, strict=False))


def _num_shared(text: str, other: str) -> int:
    """Returns the length of the longest common prefix."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _runs(messages: Messages, first: int) -> Iterator[tuple[int, int]]:
    """Yields the index range of each run of assistant messages that follows a message of another role."""
    for role, run in groupby(range(len(messages)), lambda i: messages[i]["role"]):
        numbers = [number for number in run if number >= max(first, 1)]
        are_on = all(messages[i].get(key, 1) for i in numbers for key in _SWITCHES)
        if role == "assistant" and numbers and are_on and messages[numbers[0] - 1]["role"] != role:
            yield numbers[0], numbers[-1] + 1


def _core(message: dict[str, Any]) -> tuple[str, str, str]:
    """Splits a message's text into leading white space, the rest, and trailing white space."""
    content = message.get("content") or ""
    core = content.strip()
    begin = content.index(core)
    return content[:begin], core, content[begin + len(core) :]


def _marked(message: dict[str, Any], number: int) -> dict[str, Any]:
    before, core, behind = _core(message)
    mark = f"qzv{number}bq"
    if message["role"] == "assistant":
        if not core or message.get("tool_calls"):
            return message
        mark = ""
    return message | {"content": f"{before}{mark}{core}qzv{number}eq{behind}"}


def _left_out(messages: Messages, text: str) -> Iterator[str]:
    printed = "".join(text.split())
    for message in messages:
        if message.get("function_call"):
            yield "function_call (write tool_calls)"
        for key in ("content", *THOUGHTS):
            said = message.get(key)
            if isinstance(said, str) and "".join(said.split()) not in printed:
                yield "thinking" if key in THOUGHTS or "</think>" in said else "a part of a text"
