# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads from the files of a Hugging Face directory which tokens end a completion.

The files are read in the order in which transformers and vLLM let them count. The first that
names an end-of-sequence token decides:

1. ``generation_config.json``, ``eos_token_id``; it may list several.
2. ``config.json``, ``eos_token_id``. transformers writes null here unless the model was created
   with one, as Qwen3 is by default.
3. ``tokenizer_config.json``, ``eos_token``.
4. ``special_tokens_map.json``, ``eos_token``.

The tokenizer's files name the token by its text; ``tokenizer.json`` gives its id.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class NoEosTokenError(ValueError):
    """No file names an end-of-sequence token, or none that can be used; the message lists them."""


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a completion; see the module's docstring.

    Args:
        directory: A Hugging Face directory with a ``config.json``.

    Raises:
        NoEosTokenError: If no file names such a token, or the tokenizer does not know the token
            that is named.
        OSError: If a file exists and cannot be read.
        ValueError: If a file is not valid JSON.
    """
    looked_at = []
    for name in ("generation_config.json", "config.json"):
        found = _read(directory / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
        looked_at.append(f"{name} (eos_token_id: {_absence(directory / name)})")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        text = _text_of(_read(directory / name).get("eos_token"))
        if text is not None:
            return (_id_of(text, directory, name),)
        looked_at.append(f"{name} (eos_token: {_absence(directory / name)})")
    raise NoEosTokenError(
        f"{directory} must name the token that ends a completion; none of its files does: "
        f"{', '.join(looked_at)}. Set eos_token_id in generation_config.json."
    )


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.exists() else {}


def _absence(file: Path) -> str:
    return "not set" if file.exists() else "no such file"


def _text_of(token: str | dict[str, Any] | None) -> str | None:
    """Text of a token, which some versions of transformers write as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _id_of(text: str, directory: Path, source: str) -> int:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, but its id is unknown: "
            f"there is no {file}. Set eos_token_id in generation_config.json."
        )
    try:
        token_id = Tokenizer.from_file(str(file)).token_to_id(text)
    except Exception as error:  # the library raises plain Exception
        raise NoEosTokenError(f"{file} is not a readable tokenizer: {error}.") from error
    if token_id is None:
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, which {file} does not "
            "contain. Set eos_token_id in generation_config.json."
        )
    return token_id
