# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads lines of JSON as typed values."""

from typing import TypeVar

import msgspec

from torchtitan.grpo.errors import RunError
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines

_Value = TypeVar("_Value")


class DataError(RunError, ValueError):
    """A data file cannot be used; the message names TOML key, file and line."""


def decode_line(line: bytes, kind: type[_Value], where: str) -> _Value:
    """Decodes one line of JSON as a value of ``kind``, or raises :class:`DataError`.

    ``where`` names TOML key, file and line number, as ``key: file:number``.
    """
    try:
        return msgspec.json.decode(line.removeprefix(UTF8_MARK), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        path, _, number = where.rpartition(" ")[2].rpartition(":")
        found = not_json_lines(line, path, is_first=number == "1")
        raise DataError(f"{where}: {found or f'{error}.'}") from error
