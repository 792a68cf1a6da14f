# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The text of a TOML file in which every line has its reason."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WIDTH = 100


class Setting(NamedTuple):
    """A key with its value and, unless the table says it, the reason for the value."""

    key: str
    value: Any
    why: str


Tables = Mapping[str, Sequence[Setting]]


def toml_text(heading: Sequence[tuple[str, str]], tables: Tables, ending: str) -> str:
    """``heading`` has the lines of the opening comment, each with the label that stands before it."""
    lines = [
        f"# {label + ':':9} {text}" if label else f"#           {text}" for label, text in heading
    ]
    for table, settings in tables.items():
        lines += ["", f"[{table}]"]
        for setting in settings:
            lines += _lines(setting)
    return "\n".join([*lines, "", *(f"# {line}".rstrip() for line in ending.splitlines())]) + "\n"


def _lines(setting: Setting) -> list[str]:
    line = f"{setting.key} = {toml_value(setting.value)}"
    if "\n" in line or len(line) + len(setting.why) > _WIDTH:
        return [f"# {setting.why}", line]
    return [f"{line:<26}  # {setting.why}"]


def toml_value(value: Any) -> str:
    """Writes a value; texts with line breaks take several lines."""
    if isinstance(value, str):
        if "\n" not in value:
            return _quoted(value)
        return '"""\n' + "\n".join(_quoted(line)[1:-1] for line in value.split("\n")) + '"""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {toml_value(inner)}" for key, inner in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value, allow_nan=False).replace("e-0", "e-")


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


def _quoted(text: str) -> str:
    # JSON escapes what TOML does, but for one control character.
    return json.dumps(text, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
