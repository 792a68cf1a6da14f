# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shortens the columns of a data set for the log of samples."""

from collections.abc import Mapping
from typing import Any

import msgspec

_MAX_CHARACTERS = 2000


def brief_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a prompt's columns with long values cut, such as whole files or test suites.

    Values of more than 2000 characters, or other than plain data, become the beginning of their
    text.
    """
    return {name: _brief(value) for name, value in columns.items()}


def _brief(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _cut(value)
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return _cut(repr(value))
    text = encoded.decode()
    return msgspec.json.decode(encoded) if len(text) <= _MAX_CHARACTERS else _cut(text)


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({len(text) - _MAX_CHARACTERS} more characters)"
