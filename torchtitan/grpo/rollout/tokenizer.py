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
        if self._chat is None:
            self._chat = _load_chat_tokenizer(self._path)
        text = self._chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template writes the special tokens itself.
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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
