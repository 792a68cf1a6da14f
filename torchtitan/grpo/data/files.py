# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lines of JSON that are read as typed values."""

from typing import TypeVar

import msgspec

_Value = TypeVar("_Value")


class DataError(ValueError):
    """A data file cannot be used; the message names its TOML key, the file and the line."""


def decode_line(line: bytes, kind: type[_Value], where: str) -> _Value:
    """One line as a value of ``kind``.

    Args:
        line: JSON.
        kind: What msgspec can build.
        where: Key, file and line, for the message.

    Raises:
        DataError: It is not JSON, or not of this kind.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {error}.") from error
