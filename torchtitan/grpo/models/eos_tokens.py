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

The tokenizer's files name the token by its text; ``tokenizer.json`` gives its id. A value of null, an
empty list and an empty text name none. Anything else that is not a token id of the model is refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class NoEosTokenError(ValueError):
    """No file names an end-of-sequence token, or one names what cannot be one; the message says which."""


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a completion; see the module's docstring.

    Args:
        directory: A Hugging Face directory with a ``config.json``.

    Raises:
        NoEosTokenError: If no file names such a token, the tokenizer does not know the token that is
            named, or an id is none of the model's.
        OSError: If a file exists and cannot be read.
        ValueError: If a file is not valid JSON.
    """
    looked_at = []
    for name in ("generation_config.json", "config.json"):
        if found := ids_in(directory / name):
            return found
        looked_at.append(f"{name} (eos_token_id: {_absence(directory / name)})")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if text := _text_of(directory / name):
            return (_id_of(text, directory, name),)
        looked_at.append(f"{name} (eos_token: {_absence(directory / name)})")
    raise NoEosTokenError(
        f"{directory} must name the token that ends a completion; none of its files does: "
        f"{', '.join(looked_at)}. Set eos_token_id in generation_config.json."
    )


def ids_in(file: Path) -> tuple[int, ...]:
    """Returns the ids that ``eos_token_id`` of one file names; empty if it names none.

    Args:
        file: A ``config.json``, or a ``generation_config.json`` beside one.

    Raises:
        NoEosTokenError: If the value is not a token id of the model, or a list of them.
        OSError: If a file exists and cannot be read.
        ValueError: If a file is not valid JSON.
    """
    value = _read(file).get("eos_token_id")
    found = value if isinstance(value, list) else [value]
    if all(token is None for token in found):
        return ()
    bound = _num_ids(file.parent)
    ids = [token for token in found if type(token) is int and 0 <= token < bound]
    if len(ids) < len(found):
        raise NoEosTokenError(
            f"eos_token_id in {file} must be a token id of the model, from 0 to {bound - 1}, or a list "
            f"of them, got {json.dumps(value, allow_nan=True):.200}. Correct it, or remove it so that the next file "
            "decides: generation_config.json, then config.json, then the tokenizer's eos_token."
        )
    return tuple(dict.fromkeys(ids))


def _num_ids(directory: Path) -> int:
    size = _read(directory / "config.json").get("vocab_size")
    return size if type(size) is int else sys.maxsize


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes()) if file.exists() else {}
    if not isinstance(content, dict):
        raise NoEosTokenError(f"{file} must hold an object, got a {type(content).__name__}.")
    return content


def _absence(file: Path) -> str:
    return "not set" if file.exists() else "no such file"


def _text_of(file: Path) -> str | None:
    """Text of a file's ``eos_token``, which some versions of transformers write as an object."""
    token = _read(file).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise NoEosTokenError(
            f"eos_token in {file} must be the text of a token, got {json.dumps(token, allow_nan=True):.200}. Correct it, "
            "or set eos_token_id in generation_config.json."
        )
    return text


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
    if token_id >= _num_ids(directory):
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, whose id {token_id} must be "
            f"below the model's vocab_size, {_num_ids(directory)}: no completion could end. Check that "
            "the tokenizer and config.json belong to the same model."
        )
    return token_id
