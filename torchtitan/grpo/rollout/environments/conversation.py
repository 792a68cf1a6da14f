# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the model sees of its earlier turns, where the chat template decides it.

After each turn the template renders the whole conversation. Mostly the text continues the one that
the model has seen, and the observation is what was added. A template may also write earlier turns in
another way, such as without their thinking. The context of the next turn is then not a continuation
of the tokens so far, and a new training row begins with it: the model is trained on its turn behind
the context in which the server generated it, and never on one that no server has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.rollout.tokenizer import TextCodec


@dataclass(frozen=True)
class Shown:
    """What the model sees after its turn.

    Attributes:
        token_ids: The observation, which is appended to the turn; or, if ``begins_row``, the whole
            context of the next turn.
        begins_row: Whether the next turn has a context that does not continue the tokens so far.
    """

    token_ids: list[int]
    begins_row: bool = False


class Conversation:
    """The messages of one episode, and the text of the row that is being written.

    Args:
        codec: The model's tokenizer.
        messages: The prompt.
    """

    def __init__(self, codec: TextCodec, messages: Sequence[dict[str, Any]]) -> None:
        self._codec = codec
        self._messages = list(messages)
        self._row: str | None = None  # rendered when first needed, since that may take seconds
        self._unfinished = ""  # of the assistant's message, which text has been inserted into

    def insert(self, turn_ids: Sequence[int], text: str, inserted: Sequence[int]) -> None:
        """Adds a turn of the model behind which the same message goes on.

        Args:
            turn_ids: Tokens of the turn.
            text: Their text without special tokens.
            inserted: Tokens that the environment has put behind it, if any.
        """
        row = self._codec.render_chat(self._messages) if self._row is None else self._row
        self._row = row + self._codec.decode_exactly([*turn_ids, *inserted])
        self._unfinished += text + self._codec.decode_exactly(inserted)

    def reply(
        self, turn_ids: Sequence[int], text: str, messages: Sequence[dict[str, Any]]
    ) -> Shown:
        """Adds a turn of the model and the messages after it.

        Tokens that the model wrote stay as they are: only what follows them is tokenised, or else the
        whole context of the next turn.

        Args:
            turn_ids: Tokens of the turn.
            text: Their text without special tokens.
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
