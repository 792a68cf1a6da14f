# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Renders conversations whose chat template determines what the model sees of its earlier turns.

After each turn, the template renders the whole conversation. Usually, the rendered text continues the
text that the model has seen, and the observation is the added text. A template may also write earlier
turns differently, for example without their thinking. The context of the next turn is then not a
continuation of the tokens so far, and it begins a new training row. The model is therefore trained on
each turn with the same context with which the server generated the turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.rollout.tokenizer import TextCodec


@dataclass(frozen=True)
class Shown:
    """The tokens that the model sees after its turn.

    Attributes:
        token_ids: The observation, which is appended to the turn. If ``begins_row`` is set, the whole
            context of the next turn.
        begins_row: Whether the context of the next turn does not continue the tokens so far.
    """

    token_ids: list[int]
    begins_row: bool = False


class Conversation:
    """The messages of one episode, and the text of the row that is being written.

    Args:
        codec: The model's tokenizer.
        messages: The messages of the prompt.
    """

    def __init__(self, codec: TextCodec, messages: Sequence[dict[str, Any]]) -> None:
        self._codec = codec
        self._messages = list(messages)
        self._row: str | None = None  # rendered when first needed, which may take seconds
        self._unfinished = ""  # beginning of the assistant's message that later turns continue

    def insert(self, turn_ids: Sequence[int], text: str, inserted: Sequence[int]) -> None:
        """Adds a turn of the model after which the assistant's message continues.

        Args:
            turn_ids: Tokens of the turn.
            text: Text of the turn, without special tokens.
            inserted: Tokens that the environment inserted after the turn, if any.
        """
        row = self._codec.render_chat(self._messages) if self._row is None else self._row
        self._row = row + self._codec.decode_exactly([*turn_ids, *inserted])
        self._unfinished += text + self._codec.decode_exactly(inserted)

    def reply(
        self, turn_ids: Sequence[int], text: str, messages: Sequence[dict[str, Any]]
    ) -> Shown:
        """Adds a turn of the model and the messages after it.

        If the template continues the text so far, the tokens that the model wrote are kept, and only
        the added text is tokenized. Otherwise, the whole context of the next turn is tokenized.

        Args:
            turn_ids: Tokens of the turn.
            text: Text of the turn, without special tokens.
            messages: The environment's answer.

        Raises:
            ValueError: If the template cannot render the messages.
        """
        codec = self._codec
        row = codec.render_chat(self._messages) if self._row is None else self._row
        row += codec.decode_exactly(turn_ids)
        content, self._unfinished = self._unfinished + text, ""
        self._messages += [{"role": "assistant", "content": content}, *messages]
        self._row = rendered = codec.render_chat(self._messages)
        if rendered.startswith(row):
            return Shown(codec.encode_continuation(rendered[len(row) :]))
        return Shown(codec.encode_continuation(rendered), begins_row=True)
