# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which keys there are, and what is answered to one that there is not."""

import difflib
import functools
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.grpo.command_line.errors import ConfigError
from torchtitan.grpo.command_line.other_names import answer_to


@functools.cache
def all_keys(cls: type, prefix: str = "") -> dict[str, Any]:
    """Returns the type of each setting by its key, ``table.name``, without the tables themselves."""
    keys: dict[str, Any] = {}
    for f in fields(cls):
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys |= all_keys(f.type, f"{prefix}{f.name}.")
        else:
            keys[prefix + f.name] = f.type
    return keys


@functools.cache
def all_tables(cls: type, prefix: str = "") -> dict[str, type]:
    """Returns the class of each table by its key, those inside of others included."""
    tables: dict[str, type] = {}
    for f in fields(cls):
        if isinstance(f.type, type) and is_dataclass(f.type):
            tables[prefix + f.name] = f.type
            tables |= all_tables(f.type, f"{prefix}{f.name}.")
    return tables


def check_keys(cls: type, data: dict[str, Any], prefix: str = "", known: Any = None) -> None:
    """Refuses keys of a TOML file that no table has, and names the nearest key.

    Args:
        cls: The table.
        data: Its values.
        prefix: Name of the table with a dot, empty for the whole configuration.
        known: All keys of the configuration; None reads them from ``cls``.

    Raises:
        ConfigError: If a key is unknown. The message names the first one.
    """
    known = known or all_keys(cls)
    table = {f.name: f.type for f in fields(cls)}
    for key, value in data.items():
        if key not in table:
            named, hint = _nested_hint(f"{prefix}{key}", value, known)
            hint = hint or hint_for(f"{prefix}{key}", known, table)
            raise ConfigError(f"Unknown key {named} in the TOML file. {hint}")
        inner = table[key]
        if isinstance(inner, type) and is_dataclass(inner) and isinstance(value, dict):
            check_keys(inner, value, f"{prefix}{key}.", known)


def _nested_hint(key: str, value: Any, known: Collection[str]) -> tuple[str, str]:
    """Returns the key that has an answer, the unknown table or a key in it, and the answer."""
    is_misspelt = difflib.get_close_matches(key, _tables_of(known), n=1) and not answer_to(key)
    if isinstance(value, dict) and not is_misspelt:
        for name, inner in value.items():
            named, answer = _nested_hint(f"{key}.{name}", inner, known)
            if answer:
                return named, answer
    return key, answer_to(key)


def _tables_of(known: Collection[str]) -> set[str]:
    return {key.partition(".")[0] for key in known}


def hint_for(key: str, known: Collection[str], siblings: Collection[str], mark: str = "") -> str:
    """Returns the sentence that helps whoever wrote an unknown key.

    Args:
        key: The key that was written.
        known: All keys that there are.
        siblings: Names in the table that was written.
        mark: What stands before a key where it was written: ``--``, or nothing.
    """
    if answer := answer_to(key):
        return answer
    table, _, name = key.rpartition(".")
    if name in {k.rpartition(".")[2] for k in known}:
        return _elsewhere(key, known)
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {mark}{table + '.' if table else ''}{near[0]}?"
    return _elsewhere(key, known)


def _elsewhere(key: str, known: Collection[str]) -> str:
    same_name = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    if same_name:
        near = difflib.get_close_matches(key, same_name, n=2, cutoff=0.0)
        return f"There is {' and '.join(near)}: is it in the wrong table?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"The nearest key is {near[0]}."
