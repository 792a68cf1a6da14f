# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Frames of the pipe between a worker process and its owner.

A frame is a header followed by a msgpack body. The header holds the length of the body in bytes
and the number of a call. A worker copies the call's number from the request to the reply, so a
late reply is never taken for the reply to a newer call.
"""

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

HEADER = struct.Struct("<IQ")
"""Length of the body in bytes, and the number of the call."""

PLAIN_DATA = (
    "Columns may hold plain data only: text, numbers, lists and dictionaries. Convert or remove the column "
    "in the data set."
)

_encoder = msgspec.msgpack.Encoder()
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


class NotPlainData(ValueError):
    """A message holds an object that msgpack cannot represent."""


class Refused(msgspec.Struct, tag=True):
    """Reply to a request that failed.

    Attributes:
        kind: Cause of the failure. It is equal for failures with the same cause, so that they
            can be counted together.
        message: Explanation for the user.
    """

    kind: str
    message: str


def refused(kind: str, message: str) -> Refused:
    """Makes a reply of texts of the user's code, which may hold what cannot be sent."""
    return Refused(*(text.encode(errors="backslashreplace").decode() for text in (kind, message)))


def unsendable_column(columns: Mapping[str, Any]) -> str | None:
    """Names the first column whose value cannot be sent, and why; ``None`` if all can.

    Example: ``column 'image': Encoding objects of type PngImageFile is unsupported``.
    """
    for name, value in columns.items():
        try:
            _encoder.encode(value)
        except _UNENCODABLE as error:
            return f"column {name!r}: {error}"
    return None


def not_passed(
    index: int, text: Any, columns: Mapping[str, Any], to: str, error: NotPlainData
) -> str:
    """Says what of a prompt cannot be passed to user code.

    Args:
        index: Number of the prompt.
        text: The prompt.
        columns: Its columns.
        to: What it cannot be passed to.
        error: Why the request could not be encoded.
    """
    return (
        f"Prompt {index} ({text!r:.80}) cannot be passed to {to}: {unsendable_column(columns) or error}. "
        f"{PLAIN_DATA}"
    )


def pack_frame(call: int, message: Any) -> bytes:
    """Encodes a message with the header in front of it.

    Raises:
        NotPlainData: If the message holds anything but text, bytes, booleans, numbers that fit
            into 64 bits, lists, dictionaries and ``None``.
    """
    try:
        body = _encoder.encode(message)
    except _UNENCODABLE as error:
        raise NotPlainData(str(error)) from error
    return HEADER.pack(len(body), call) + body
