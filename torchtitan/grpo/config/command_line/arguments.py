# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads ``--table.key value`` and its other spellings.

--grpo.group_size 4      --grpo.group_size=4      --grpo.group-size=4
--inference.launch       --inference.no-launch    --inference.launch=false
--prompts.paths A,B      --prompts.paths A B      --prompts.paths '["A", "B"]'
--prompts.rename '{question = "prompt"}'          --prompts.rename.question prompt
--cluster.both.tags train,rollout
--evaluation.sets.gsm8k.num_samples 8             --environments.math.reward.functions a,b
--debug.seed none
"""

import json
import tomllib
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.keys import (
    all_keys,
    answer_to_value,
    hint_for,
    row_type,
    settings,
    unknown_keys,
)

_REMEDY = "Change it on the command line."
_NONE = ("none", "None", "null")
_SIMPLE = {
    int: ("N", "an integer"),
    float: ("X", "a number"),
    bool: ("", "true or false"),
    str: ("TEXT", "text"),
    type(None): ("", "none"),
}

Override = tuple[tuple[str, ...], Any]
"""The names of the tables and of a setting (and of a key in one that is a dict), and its value."""


def read_arguments(cls: type, args: list[str]) -> tuple[list[Override], list[str]]:
    """Returns the values that arguments give to settings of ``cls``, and a sentence on each wrong argument."""
    found, wrong = list[Override](), list[str]()
    for option, words in _split(args):
        try:
            found += _read(cls, option, words)
        except ConfigError as error:
            wrong.append(str(error))
    return found, wrong


def _split(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    option, words = "", list[str]()
    for arg in args:
        if arg.startswith("--") and arg[2:3].isalpha():
            if option:
                yield option, words
            option, equals, value = arg.partition("=")
            words = [value] if equals else []
        elif not option:
            raise ConfigError(
                f"Unexpected argument {arg!r}: settings are given as --table.key value. {_REMEDY}"
            )
        else:
            words.append(arg)
    if option:
        yield option, words


def _read(cls: type, option: str, words: list[str]) -> Iterator[Override]:
    path, annotation, is_cleared = _target(cls, option)
    if is_cleared:
        if words:
            raise ConfigError(f"{option} takes no value, got {words[0]!r}. {_REMEDY}")
        yield path, False
    elif not words and is_flag(annotation):
        yield path, True
    else:
        _check_number(option, words, list in _origins(annotation), in_words(annotation))
        try:
            yield from _converted(path, annotation, _parsed(annotation, words))
        except ValueError as error:  # of msgspec as well
            if isinstance(error, ConfigError):
                raise
            got = " ".join(words)
            inner = f" ({error})" if _origins(annotation) & {dict, list} else ""
            hint = answer_to_value(".".join(path), got) or _REMEDY
            raise ConfigError(
                f"{option} must be {in_words(annotation)}, got {got!r}{inner}. {hint}"
            ) from error


def _target(cls: type, option: str) -> tuple[tuple[str, ...], Any, bool]:
    """Returns the path that an argument sets, its type, and whether it clears a flag."""
    keys, key = all_keys(cls), option[2:].replace("-", "_")
    if key in keys:
        return tuple(key.split(".")), keys[key], False
    table, _, name = key.rpartition(".")
    flag = f"{table}.{name.removeprefix('no_')}"
    if name.startswith("no_") and is_flag(keys.get(flag)):
        return tuple(flag.split(".")), bool, True
    if inside := _in_dict(option, keys):
        return *inside, False
    if key.startswith("no_") and is_flag(keys.get(key.removeprefix("no_"))):
        written = option.removeprefix("--no-").rpartition(".")
        raise ConfigError(
            f"Unknown argument {option}. Did you mean --{written[0]}.no-{written[2]}?"
        )
    known = settings(cls)
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == table]
    raise ConfigError(f"Unknown argument {option}. {hint_for(key, known, siblings, '--')}")


def _in_dict(option: str, keys: dict[str, Any]) -> tuple[tuple[str, ...], Any] | None:
    """Returns path and type of an entry of a dict setting, as in ``--prompts.rename.old new``; else None."""
    parts = option[2:].split(".")
    for end in range(1, len(parts)):
        path, within = ".".join(parts[:end]).replace("-", "_").split("."), parts[end:]
        annotation = keys.get(".".join(path))
        if get_origin(annotation) is dict:
            inner = get_args(annotation)[1]
            if (row := row_type(annotation)) and len(within) > 1:
                entry, of_row = ".".join(within[1:]).replace("-", "_"), settings(row)
                if entry not in of_row:
                    key = ".".join((*path, within[0], entry))
                    hint = hint_for(key, keys, of_row, "--")
                    raise ConfigError(f"Unknown argument {option}. {hint}")
                return (*path, within[0], entry), of_row[entry]
            if get_origin(inner) is dict and len(within) > 1:  # a table of tables
                entry = ".".join(within[1:]).replace("-", "_")
                # Of an environment, a key of the run.
                kind = keys.get(entry, get_args(inner)[1])
                return (*path, within[0], *entry.split(".")), kind
            return (*path, ".".join(within)), inner
    return None


def _check_number(option: str, words: list[str], is_list: bool, expected: str) -> None:
    if not words:
        raise ConfigError(
            f"{option} needs a value, {expected}. A value that begins with -- is given as "
            f"{option}=--value. {_REMEDY}"
        )
    if len(words) > 1 and not is_list:
        raise ConfigError(
            f"Unexpected argument {words[1]!r} after {option} {words[0]}: it takes one value. {_REMEDY}"
        )


def _parsed(annotation: Any, words: list[str]) -> Any:
    """Parses the words after an option as TOML would; values of plain types, such as numbers, stay text."""
    origins, text = _origins(annotation), " ".join(words)
    if type(None) in origins and text in _NONE:
        return None
    is_array = len(words) == 1 and text.lstrip().startswith("[")
    if list in origins and not is_array:
        return [part for word in words if word for part in word.split(",")]
    if list in origins or dict in origins or is_dataclass(annotation):
        return _data(text)
    if Any in origins:
        try:
            return _data(text.lower() if text in ("True", "False") else text)
        except ValueError:
            return text
    return text


def _data(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"]:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        pass
    return json.loads(text)


def _converted(path: tuple[str, ...], annotation: Any, value: Any) -> Iterator[Override]:
    """Yields a setting's path and its value in the setting's type; for a table, those of each setting in it."""
    if (row := row_type(annotation)) and isinstance(value, dict):
        yield path, {}
        for name, of_row in value.items():
            yield from _converted((*path, name), row, of_row)
        return
    if not is_dataclass(annotation):
        yield path, msgspec.convert(value, type=annotation, strict=False)
        return
    assert isinstance(annotation, type)
    if wrong := [*unknown_keys(annotation, msgspec.convert(value, type=dict))]:
        raise ConfigError("\n".join(wrong))
    for f in fields(annotation):
        if f.name in value:
            yield from _converted((*path, f.name), f.type, value[f.name])


def members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself, without ``Annotated``."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _origins(annotation: Any) -> set[Any]:
    return {get_origin(member) or member for member in members(annotation)}


def is_flag(annotation: Any) -> bool:
    return members(annotation) == (bool,)


def in_words(annotation: Any) -> str:
    return " or ".join(_names(member)[1] for member in members(annotation))


def metavar(annotation: Any) -> str:
    """Returns the placeholder of a setting's value, such as ``N`` or ``auto|cpu|cuda``."""
    return _names(members(annotation)[0])[0]


def _names(member: Any) -> tuple[str, str]:
    origin = get_origin(member) or member
    if origin is Literal:
        choices = [str(choice) for choice in get_args(member)]
        return "|".join(choices), f"one of {', '.join(choices)}"
    if origin is list:
        return "A,B,...", 'a list, such as A,B or ["A", "B"]'
    if origin is dict or is_dataclass(origin):
        return "{key = value}", 'a table, such as {key = "value"}'
    return _SIMPLE.get(member, ("VALUE", "a value"))
