# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads what the model wrote: its text, its thinking, its tool calls, and stop strings in it."""

import secrets
from dataclasses import dataclass, replace

from torchtitan.grpo.rollout.agents.answering import Stop
from torchtitan.grpo.rollout.agents.exchange import ModelAnswer, ModelRequest
from torchtitan.grpo.rollout.agents.rows import part_of
from torchtitan.grpo.rollout.agents.thinking import THINKING_MARKS, divided
from torchtitan.grpo.rollout.agents.tool_calls import CALL_MARKS, ParsedAnswer, Parser, ToolCall
from torchtitan.grpo.rollout.agents.transcript import Context
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Generation

# Ids of tool calls are of the length that every chat template accepts.
_CALL_ID_LEN = 9


@dataclass(frozen=True)
class AnswerReader:
    """``parser`` reads the calls of the model's chat template, if it writes any in a known form."""

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
        """Cuts an answer behind the token that completes the first stop string in its text."""
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
        """The text of an answer, with the special tokens that divide it, if they may."""
        marks = () if asked.messages is None else THINKING_MARKS
        marks += CALL_MARKS if self._parser(asked) else ()
        return self.codec.decode(ids, marks)

    def _parser(self, asked: ModelRequest) -> Parser | None:
        return self.parser if asked.tools and asked.may_call else None


def _with_ids(calls: list[ToolCall]) -> list[ToolCall]:
    """Keeps ids that the model wrote, if each is another one: it reads them beside results."""
    if len({call.id for call in calls} - {""}) == len(calls):
        return calls
    return [call._replace(id=secrets.token_hex(_CALL_ID_LEN)[:_CALL_ID_LEN]) for call in calls]
