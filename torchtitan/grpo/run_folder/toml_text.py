# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes a configuration as TOML, which the standard library only reads."""

import json
import re
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MASK = "***"


def to_toml(tables: dict[str, Any]) -> str:
    """Returns tables of settings as the text of a TOML file.

    TOML has no null, so a key whose value is None stands in a comment. So does a masked key:
    a run that is started with the file must take it from elsewhere.
    """
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [_setting(key, value) for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _setting(key: str, value: Any) -> str:
    if value is None:
        return f"# {_key(key)} is not set"
    if value == _MASK:
        return f"# {_key(key)} is set; its value is not kept"
    return f"{_key(key)} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """Returns one value in TOML's notation; None, which TOML lacks, as ``not set``."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf and nan as well are written as TOML does
    if isinstance(value, dict):
        held = ((_key(str(k)), v) for k, v in value.items() if v is not None)
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in held) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    # JSON escapes a string as TOML does, but for one control character.
    return json.dumps(str(value), ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False, allow_nan=False)
