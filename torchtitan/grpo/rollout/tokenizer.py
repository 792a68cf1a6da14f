# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Converts prompts to token IDs and completions to text, without torch.

The fast tokenizer alone reads `tokenizer.json`. transformers is imported only if a
conversational prompt needs the model's chat template.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan.grpo.weight_wire.model_folder import about_pointer

# Placeholder for the assistant's turn when a reply is rendered. Templates keep letters as is.
_TURN = "THETURNOFTHEASSISTANT"


class TextCodec:
    """Encodes prompts and decodes completions with the model's tokenizer.

    Args:
        hf_assets_path: Directory that contains ``tokenizer.json``.
        eos_token_ids: Tokens that are removed from the end of a completion before decoding.
        chat_template_kwargs: Variables for the chat template (``prompts.chat_template_kwargs``).

    Raises:
        ValueError: If there is no readable ``tokenizer.json``.
    """

    def __init__(
        self,
        hf_assets_path: str,
        eos_token_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = Path(hf_assets_path)
        self._chat_kwargs = dict(chat_template_kwargs or {})
        self._eos = frozenset(eos_token_ids)
        self._chat: Any = None
        self._plain: Tokenizer | None = None
        file = self._path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"model.hf_assets_path must contain a tokenizer.json, but {file} does not exist. "
                "Set it to a Hugging Face directory with a fast tokenizer."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            hint = about_pointer(file)
            raise ValueError(f"{file} is not a readable tokenizer: {error}.{hint}") from error
        # A saved tokenizer may contain truncation and padding settings of its training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> list[int]:
        """Returns the token IDs of a plain prompt, including the beginning of sequence if any."""
        return self._tokenizer.encode(text).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the token IDs of text that follows other text, without added special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the token IDs of a conversation and of the start of the assistant's turn."""
        # The template writes the special tokens itself.
        return self.encode_continuation(self._render(messages))

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Returns the text of a conversation and of the start of the assistant's turn.

        Raises:
            ValueError: If the template cannot render the messages.
        """
        return self._render(messages)

    def encode_reply(
        self, messages: Sequence[dict[str, Any]], turn_ids: Sequence[int]
    ) -> list[int]:
        """Returns the token IDs of a reply to the assistant's turn.

        They include the start of the next assistant turn. The chat template renders an artificial
        conversation that ends with the given messages, and the text after the assistant's
        message is used. The tokens of the turn itself stay as the model generated them. The
        end-of-turn token that the template writes is omitted if the model has generated it.

        Args:
            messages: Chat messages that follow the assistant's turn.
            turn_ids: Tokens of the assistant's turn.

        Raises:
            ValueError: If the template cannot render the messages.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, mark, reply = self._render([*before, *messages]).rpartition(_TURN)
        if not mark:
            raise ValueError(
                "The model's chat template must render an assistant message unchanged, but it "
                "omits the message. Return the observation as text instead of chat messages."
            )
        last = turn_ids[-1] if turn_ids else None
        if last in self._eos and (end := self._tokenizer.id_to_token(last)):
            reply = reply.removeprefix(end)
        return self.encode_continuation(reply)

    def encode_observation(self, text: str, *, has_special_tokens: bool) -> list[int]:
        """Returns the token IDs of text that an environment inserts.

        Args:
            text: The observation.
            has_special_tokens: Whether special tokens in the text are encoded as such. Otherwise
                they are encoded as plain text.
        """
        if has_special_tokens:
            return self.encode_continuation(text)
        if self._plain is None:
            self._plain = Tokenizer.from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        return self._plain.encode(text, add_special_tokens=False).ids

    def single_token(self, text: str) -> int | None:
        """Returns the one token that spells the text, or ``None`` if there is none."""
        ids = self.encode_continuation(text)
        return ids[0] if len(ids) == 1 else None

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token by its spelling, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        """The largest id of the tokenizer's tokens, added ones included."""
        return max(self._tokenizer.get_vocab().values(), default=-1)

    def token_text(self, token_id: int) -> str | None:
        """Returns the spelling of a token, or ``None`` if the tokenizer does not have it."""
        return self._tokenizer.id_to_token(token_id)

    def has_chat_template(self) -> bool:
        """Returns whether the directory has a chat template, which string prompts do not use."""
        if (self._path / "chat_template.jinja").is_file():
            return True
        file = self._path / "tokenizer_config.json"
        return file.is_file() and bool(json.loads(file.read_bytes()).get("chat_template"))

    def end_of_turn(self) -> str | None:
        """Returns the special token that the chat template writes after an assistant's message."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        rest = self._render(turn, opens_turn=False).rpartition(_TURN)[2].lstrip()
        ids = self.encode_continuation(rest)
        text = self._tokenizer.id_to_token(ids[0]) if ids else None
        # Only a special token is spelled in one piece and left out when text is decoded.
        return (
            text if text and not self._tokenizer.decode(ids[:1], skip_special_tokens=True) else None
        )

    def _render(self, messages: Sequence[dict[str, Any]], *, opens_turn: bool = True) -> str:
        if self._chat is None:
            self._chat = _load_chat_tokenizer(self._path)
            _check_variables(self._chat, self._chat_kwargs, self._path)
        try:
            return self._chat.apply_chat_template(
                messages, add_generation_prompt=opens_turn, tokenize=False, **self._chat_kwargs
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"The chat template of {self._path} cannot render {messages!r:.200}: {error}"
            ) from error

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Returns the text of a completion, without special tokens and end of sequence."""
        ids = list(completion_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_exactly(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens with all special tokens, as the model reads them."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


def _load_chat_tokenizer(path: Path) -> Any:
    # Imported here, because transformers takes seconds to import and plain prompts do not need it.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The prompts are chat messages, but the tokenizer in {path} has no chat template. Use "
            "string prompts (prompts.template), or a model directory with a chat template."
        )
    return tokenizer


def _check_variables(tokenizer: Any, variables: Mapping[str, Any], path: Path) -> None:
    """Refuses variables that the template never mentions: Jinja would ignore them."""
    templates = tokenizer.chat_template
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise ValueError(
                f"prompts.chat_template_kwargs sets {name!r}, which the chat template of {path} does "
                "not read. Remove it, or check its spelling against the template."
            )
