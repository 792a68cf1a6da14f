# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads lines of JSON as typed values."""

from typing import TypeVar

import msgspec

from torchtitan.grpo.errors import RunError
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines

_Value = TypeVar("_Value")


class DataError(RunError, ValueError):
    """Raised for a data file that cannot be used; the message names TOML key, file and line."""


def decode_line(line: bytes, kind: type[_Value], where: str) -> _Value:
    """Decodes one line as a value of ``kind``.

    Args:
        line: The line, in JSON.
        kind: A type that msgspec supports.
        where: TOML key, file and line number, for error messages, as ``key: file:number``.

    Raises:
        DataError: If the line is not JSON, or not a value of this type.
    """
    try:
        return msgspec.json.decode(line.removeprefix(UTF8_MARK), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        path, _, number = where.rpartition(" ")[2].rpartition(":")
        found = not_json_lines(line, path, is_first=number == "1")
        raise DataError(f"{where}: {found or f'{error}.'}") from error
