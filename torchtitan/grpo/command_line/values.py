# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns the words of the command line into the value of a setting.

| type of the setting | on the command line |
|---|---|
| a number, a string, a choice | the value itself |
| bool | ``--table.key``, ``--table.no-key``, or ``true`` and ``false`` |
| a list | ``A,B,C``, several words ``A B C``, or an array ``["A", "B"]`` as in TOML or JSON |
| a table | ``{key = "value"}`` as in TOML, or ``{"key": "value"}`` as in JSON |
| what may be None | ``none``, besides its values |
"""

import json
import tomllib
import types
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_NONE = ("none", "None", "null")
_BOOLS = {"true": True, "True": True, "false": False, "False": False}
_EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class ValueReadError(ValueError):
    """Words that are no value of a type. The message says what is expected."""


def bare_type(annotation: Any) -> Any:
    """Returns a type without ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself; a list comes before other types."""
    annotation = bare_type(annotation)
    if get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(sorted(get_args(annotation), key=lambda member: not is_list(member)))


def is_list(annotation: Any) -> bool:
    """Returns whether a type, or a member of a union, is a list."""
    return any(get_origin(a) is list or a is list for a in _members(annotation))


def is_table(annotation: Any) -> bool:
    """Returns whether a type is a table: a dict or a dataclass."""
    return any(a is dict or get_origin(a) is dict or is_dataclass(a) for a in _members(annotation))


def is_flag(annotation: Any) -> bool:
    """Returns whether a setting is on or off."""
    return bare_type(annotation) is bool


def _members(annotation: Any) -> tuple[Any, ...]:
    annotation = bare_type(annotation)
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def expected(annotation: Any) -> str:
    """Returns in words what a setting takes."""
    names = []
    for member in alternatives(annotation):
        if get_origin(member) is Literal:
            names.append(f"one of {', '.join(map(str, get_args(member)))}")
        elif is_list(member):
            names.append('a list, such as A,B or ["A", "B"]')
        elif is_table(member):
            names.append('a table, such as {key = "value"}')
        else:
            names.append("none" if member is type(None) else _EXPECTED.get(member, "a value"))
    return " or ".join(names)


def read_value(annotation: Any, words: list[str]) -> Any:
    """Returns the value that some words of the command line give a setting.

    Args:
        annotation: Type of the setting.
        words: What stands behind its name; none for a flag that stands alone.

    Raises:
        ValueReadError: If the words are no value of this type.
    """
    members = alternatives(annotation)
    if type(None) in members and len(words) == 1 and words[0] in _NONE:
        return None
    if not words and is_flag(annotation):
        return True
    for member in members:
        if member is not type(None):
            try:
                return _read_member(member, words)
            except ValueError:
                continue
    got = " ".join(words)
    raise ValueReadError(
        f"must be {expected(annotation)}, got {got!r}" if words else "needs a value"
    )


def _read_member(member: Any, words: list[str]) -> Any:
    if is_list(member):
        return _read_list(member, words)
    if len(words) != 1:
        raise ValueReadError("one value is needed")
    (word,) = words
    if is_table(member):
        value = read_data(word)
        if not isinstance(value, dict):
            raise ValueReadError("no table")
        return value
    if member is bool:
        if word not in _BOOLS:
            raise ValueReadError("no bool")
        return _BOOLS[word]
    if get_origin(member) is Literal and word not in map(str, get_args(member)):
        raise ValueReadError("no choice")
    if member is Any:
        return read_any(word)
    return member(word) if member in (int, float) else word


def _read_list(member: Any, words: list[str]) -> list[Any]:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        value = read_data(words[0])
        if not isinstance(value, list):
            raise ValueReadError("no list")
        return value
    (element,) = get_args(member) or (str,)
    if is_list(element) or is_table(element):
        raise ValueReadError("an array is needed")
    parts = [part for word in words for part in (word.split(",") if word else [])]
    return [_read_member(bare_type(element), [part]) for part in parts]


def read_data(text: str) -> Any:
    """Returns the value of a text in the form of TOML or of JSON.

    Raises:
        ValueReadError: If the text is neither.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"]:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueReadError("neither TOML nor JSON") from error


def read_any(word: str) -> Any:
    """Returns the value of a setting of any type: data where the word reads as such, else text."""
    if word in _BOOLS:
        return _BOOLS[word]
    try:
        return read_data(word)
    except ValueReadError:
        return word
