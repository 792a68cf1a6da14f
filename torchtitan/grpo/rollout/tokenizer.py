# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prompts to token ids, completions to text, without torch.

The fast tokenizer alone reads `tokenizer.json`; transformers is imported only when a
conversational prompt needs the model's chat template.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Stands for the assistant's turn where a reply to it is rendered; no template changes letters.
_TURN = "THETURNOFTHEASSISTANT"


class TextCodec:
    """The model's tokenizer.

    Args:
        hf_assets_path: Directory that holds ``tokenizer.json``.
        eos_token_ids: Dropped from the end of a completion before it is decoded.

    Raises:
        ValueError: There is no readable ``tokenizer.json``.
    """

    def __init__(self, hf_assets_path: str, eos_token_ids: Sequence[int]) -> None:
        self._path = Path(hf_assets_path)
        self._eos = frozenset(eos_token_ids)
        self._chat: Any = None
        self._plain: Tokenizer | None = None
        file = self._path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"model.hf_assets_path must hold a tokenizer.json, and {file} is not there. "
                "Point it to a Hugging Face directory with a fast tokenizer."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
        # A saved tokenizer may carry the settings of its training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the tokenizer's own beginning of sequence."""
        return self._tokenizer.encode(text).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of text that stands behind other text, without special tokens of its own."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation and the opening of the assistant's turn."""
        # The template writes the special tokens itself.
        return self.encode_continuation(self._render(messages))

    def encode_reply(
        self, messages: Sequence[dict[str, Any]], turn_ids: Sequence[int]
    ) -> list[int]:
        """Token ids of messages that answer the assistant's turn, and of its next opening.

        The chat template is applied to a conversation of which all but these messages is made
        up, and what it puts behind the assistant's text is taken. So the turn itself is as the
        model wrote it; the end of it that the template writes is left out where the model wrote
        it already.

        Args:
            messages: As in a chat, the assistant's own turn left out.
            turn_ids: What the model wrote.

        Raises:
            ValueError: The template cannot write them.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, mark, reply = self._render([*before, *messages]).rpartition(_TURN)
        if not mark:
            raise ValueError(
                "The model's chat template must write an assistant's message as it is, and has "
                "left it out. Give the observation as text."
            )
        last = turn_ids[-1] if turn_ids else None
        if last in self._eos and (end := self._tokenizer.id_to_token(last)):
            reply = reply.removeprefix(end)
        return self.encode_continuation(reply)

    def encode_observation(self, text: str, *, has_special_tokens: bool) -> list[int]:
        """Token ids of text that an environment put in.

        Args:
            text: What was observed.
            has_special_tokens: Special tokens in it are such; else they are spelled out.
        """
        if has_special_tokens:
            return self.encode_continuation(text)
        if self._plain is None:
            self._plain = Tokenizer.from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        return self._plain.encode(text, add_special_tokens=False).ids

    def single_token(self, text: str) -> int | None:
        """The one token that spells the text; None where there is none."""
        ids = self.encode_continuation(text)
        return ids[0] if len(ids) == 1 else None

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        if self._chat is None:
            self._chat = _load_chat_tokenizer(self._path)
        try:
            return self._chat.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"The chat template of {self._path} cannot write {messages!r:.200}: {error}"
            ) from error

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens and end of sequence."""
        ids = list(completion_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _load_chat_tokenizer(path: Path) -> Any:
    # Imported late: transformers imports torch, seconds that plain prompts need not cost.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The prompts are chat messages, and the tokenizer in {path} has no chat template. "
            "Use string prompts (prompts.template), or a model directory with a chat template."
        )
    return tokenizer
