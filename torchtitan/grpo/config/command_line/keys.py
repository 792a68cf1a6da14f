# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The keys of a configuration, and answers to unknown keys and values."""

import difflib
import functools
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin


@functools.cache
def all_keys(cls: type, prefix: str = "") -> dict[str, Any]:
    """Returns the types of settings and tables by their keys, such as ``grpo.group_size``."""
    keys: dict[str, Any] = {}
    for f in fields(cls):
        keys[prefix + f.name] = f.type
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys |= all_keys(f.type, f"{prefix}{f.name}.")
    return keys


@functools.cache
def settings(cls: type) -> dict[str, Any]:
    return {key: kind for key, kind in all_keys(cls).items() if not is_dataclass(kind)}


def unknown_keys(
    cls: type, data: dict[str, Any], prefix: str = "", known: Any = None
) -> Iterator[str]:
    """Yields a sentence for each unknown key; the sentence suggests what to use instead.

    ``cls`` is the type of the table ``data``, whose keys begin with ``prefix``; ``known`` has all settings.
    """
    known = known or settings(cls)
    table = {f.name: f.type for f in fields(cls)}
    for key, value in data.items():
        if key not in table:
            for named, hint in _nested_answers(f"{prefix}{key}", value, known):
                siblings = table if named == f"{prefix}{key}" else ()
                hint = hint or hint_for(named, known, siblings)
                yield f"Unknown key {named} in the TOML file. {hint}"
            continue
        inner = table[key]
        if isinstance(inner, type) and is_dataclass(inner) and isinstance(value, dict):
            yield from unknown_keys(inner, value, f"{prefix}{key}.", known)
        elif (row := row_type(inner)) and isinstance(value, dict):
            for name, of_row in value.items():
                if isinstance(of_row, dict):
                    yield from unknown_keys(row, of_row, f"{prefix}{key}.{name}.", known)


def row_type(kind: Any) -> type | None:
    """Returns the dataclass of the tables in a setting such as ``dict[str, ClusterRow]``."""
    inner = get_args(kind)[1] if get_origin(kind) is dict else None
    return inner if isinstance(inner, type) and is_dataclass(inner) else None


def _nested_answers(key: str, value: Any, known: Collection[str]) -> list[tuple[str, str]]:
    """Returns unknown keys with their advice: ``key`` itself, or all keys inside it if any of those has one."""
    own = answer_to(key)
    tables = {k.partition(".")[0] for k in known}
    is_misspelt = difflib.get_close_matches(key, tables, n=1) and not own
    if isinstance(value, dict) and not is_misspelt:
        found = [pair for k, v in value.items() for pair in _nested_answers(f"{key}.{k}", v, known)]
        if any(answer for _, answer in found):
            return [(named, answer or own) for named, answer in found]
    return [(key, own)]


def hint_for(key: str, known: Collection[str], siblings: Collection[str], mark: str = "") -> str:
    """Returns advice on an unknown key. ``siblings`` are its table's keys; ``mark`` precedes suggested keys."""
    if answer := answer_to(key):
        return answer
    table, _, name = key.rpartition(".")
    last_parts = {k.rpartition(".")[2] for k in known}
    name = name.removeprefix("no_")  # of a flag
    similar = difflib.get_close_matches(name, last_parts, n=1, cutoff=0.85)
    for near in similar or difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        if near in siblings:
            return f"Did you mean {mark}{table + '.' if table else ''}{near}?"
        of_name = [k for k in known if k.rpartition(".")[2] == near]
        keys = " and ".join(difflib.get_close_matches(key, of_name, n=2, cutoff=0.0))
        if near == key.rpartition(".")[2]:
            return f"There is {keys}: is it in the wrong table?"
        return f"The nearest key is {keys}."
    return (
        "No key has a similar name: see --help, or docs/other-names.md for those of other systems."
    )


@functools.cache
def other_names() -> dict[str, Any]:
    """Returns other projects' names of settings, tables and values, each with its equivalent here."""
    data = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())
    names, tables = (
        {name: answer for answer, names in data[part].items() for name in names}
        for part in ("names", "tables")
    )
    for table, keys in data["keys"].items():
        names |= {name: f"{table}.{key}" for name, key in keys.items()}
    return {"names": names, "tables": tables, "values": data["values"]}


def answer_to(key: str) -> str:
    """Returns what to use in place of another project's setting or table; empty if unknown."""
    key = key.replace("-", "_")
    parts, names = key.split("."), other_names()["names"]
    for name in (".".join(parts[i:]) for i in range(len(parts))):
        if answer := names.get(name):
            return answer if " " in answer else f"It is called {answer} here."
    return other_names()["tables"].get(key, "")


def answer_to_value(key: str, value: object) -> str:
    """Returns what to use in place of another project's value of a setting; empty if unknown."""
    word = str(value).lower().replace("-", "_")
    answer = other_names()["values"].get(key, {}).get(word, "")
    return f'It is called "{answer}" here.' if answer and " " not in answer else answer
