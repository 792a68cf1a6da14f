# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads ``--table.key value`` and its other spellings; `values.py` has the forms of values.

--grpo.group_size 4      --grpo.group_size=4      --grpo.group-size=4
--inference.launch       --inference.no-launch    --inference.launch=false
--prompts.rename '{question = "prompt"}'          --prompts.rename.question prompt
--evaluation.sets.gsm8k.num_samples 8
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import msgspec

from torchtitan.grpo.command_line.errors import ConfigError
from torchtitan.grpo.command_line.keys import all_keys, all_tables, check_keys, hint_for
from torchtitan.grpo.command_line.other_names import answer_to_value
from torchtitan.grpo.command_line.values import (
    ValueReadError,
    expected,
    is_flag,
    is_list,
    read_value,
)

_REMEDY = "Change it on the command line."


@dataclass(frozen=True)
class Override:
    """One value from the command line.

    Attributes:
        path: Names of the tables and of the setting, and the key in a setting that is a table.
        value: What to set.
    """

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class _Target:
    """What an argument sets: a setting, or a key in one that is a table."""

    path: tuple[str, ...]
    type: Any
    switches_off: bool = False


@dataclass
class _Given:
    """An argument as it was written: its name with the dashes, and the words behind it."""

    option: str
    words: list[str]
    has_equals: bool = False


def read_arguments(cls: type, args: list[str]) -> list[Override]:
    """Returns the values that a command line gives the settings of ``cls``, in their order.

    Raises:
        ConfigError: If an argument is unknown, or its value cannot be that of the setting. The
            message names the first one.
    """
    keys, tables = all_keys(cls), all_tables(cls)
    return [_read(given, _target(given.option, keys, tables)) for given in _split(args)]


def apply(config: Any, overrides: list[Override]) -> None:
    """Sets the values in a configuration."""
    for override in overrides:
        _set(config, override.path, override.value)


def _set(table: Any, path: tuple[str, ...], value: Any) -> None:
    name, *rest = path
    if not rest:
        if dataclasses.is_dataclass(getattr(table, name)):
            for key, inner in value.items():
                _set(getattr(table, name), (key,), inner)
        else:
            setattr(table, name, value)
    elif isinstance(inner := getattr(table, name), dict):
        entry, *within = rest
        value = {**inner.get(entry, {}), within[0]: value} if within else value
        setattr(table, name, inner | {entry: value})
    else:
        _set(inner, tuple(rest), value)


def _split(args: list[str]) -> Iterator[_Given]:
    current: _Given | None = None
    for arg in args:
        if arg.startswith("--") and arg[2:3].isalpha():
            if current is not None:
                yield current
            option, equals, value = arg.partition("=")
            current = _Given(option, [value] if equals else [], bool(equals))
        elif current is None:
            raise ConfigError(
                f"Unexpected argument {arg!r}: settings are given as --table.key value. {_REMEDY}"
            )
        else:
            current.words.append(arg)
    if current is not None:
        yield current


def _target(option: str, keys: dict[str, Any], tables: dict[str, type]) -> _Target:
    """Returns what an argument sets.

    Raises:
        ConfigError: If there is no such setting.
    """
    key = option[2:].replace("-", "_")
    if key in keys:
        return _Target(tuple(key.split(".")), keys[key])
    if key in tables:
        return _Target(tuple(key.split(".")), tables[key])
    table, _, name = key.rpartition(".")
    flag = f"{table}.{name.removeprefix('no_')}"
    if name.startswith("no_") and is_flag(keys.get(flag)):
        return _Target(tuple(flag.split(".")), keys[flag], switches_off=True)
    if inside := _in_dict(option, keys):
        return inside
    if key.startswith("no_") and is_flag(keys.get(key.removeprefix("no_"))):
        flag_table, _, flag = option[len("--no-") :].rpartition(".")
        raise ConfigError(f"Unknown argument {option}. Did you mean --{flag_table}.no-{flag}?")
    siblings = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == table]
    raise ConfigError(f"Unknown argument {option}. {hint_for(key, keys, siblings, '--')}")


def _in_dict(option: str, keys: dict[str, Any]) -> _Target | None:
    """Returns the key of a setting that is a dict, as in ``--prompts.rename.old new``."""
    parts = option[2:].split(".")
    for end in range(2, len(parts)):
        key = ".".join(parts[:end]).replace("-", "_")
        annotation = keys.get(key)
        if get_origin(annotation) is dict:
            inner = (get_args(annotation) or (str, Any))[1]
            within = parts[end:]
            if get_origin(inner) is dict and len(within) > 1:  # a table of tables
                entry = ".".join(within[1:]).replace("-", "_")
                return _Target((*key.split("."), within[0], entry), get_args(inner)[1])
            return _Target((*key.split("."), ".".join(within)), inner)
    return None


def _read(given: _Given, target: _Target) -> Override:
    words, annotation = given.words, target.type
    if target.switches_off:
        if words:
            raise ConfigError(f"{given.option} takes no value, got {words[0]!r}. {_REMEDY}")
        return Override(target.path, False)
    allowed = 1 if not is_list(annotation) else len(words)
    if len(words) > allowed:
        raise ConfigError(
            f"Unexpected argument {words[allowed]!r} after {given.option} {words[0]}: it takes one "
            f"value. {_REMEDY}"
        )
    if not words and is_list(annotation):
        raise ConfigError(
            f"{given.option} needs a value, {expected(annotation)}. A value that begins with -- is "
            f"given as {given.option}=--value. {_REMEDY}"
        )
    try:
        value = read_value(annotation, words)
        return Override(target.path, _checked(annotation, value))
    except ValueReadError as error:
        hint = answer_to_value(".".join(target.path), " ".join(words))
        raise ConfigError(f"{given.option} {error}. {hint or _REMEDY}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{given.option} must be {expected(annotation)}, got {' '.join(words)!r} "
            f"({error}). {_REMEDY}"
        ) from error


def _checked(annotation: Any, value: Any) -> Any:
    """Returns the value in the type of its setting; a table only with keys that it has."""
    if not dataclasses.is_dataclass(annotation):
        return msgspec.convert(value, type=annotation)
    assert isinstance(annotation, type)
    check_keys(annotation, value)
    return _part(msgspec.convert(value, type=annotation), value)


def _part(table: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a table that were given, in their types."""
    part = {}
    for key, given in value.items():
        inner = getattr(table, key)
        part[key] = _part(inner, given) if dataclasses.is_dataclass(inner) else inner
    return part
