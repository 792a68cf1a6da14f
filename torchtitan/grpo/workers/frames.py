# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Frames of the pipe between a worker process and its owner.

A frame is a header followed by a msgpack body. The header holds the length of the body in bytes
and the number of a call. A worker copies the call's number from the request to the reply, so a
late reply is never taken for the reply to a newer call.
"""

import struct
from typing import Any

import msgspec

HEADER = struct.Struct("<IQ")
"""Length of the body in bytes, and the number of the call."""

_encoder = msgspec.msgpack.Encoder()


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


def pack_frame(call: int, message: Any) -> bytes:
    """Encodes a message with the header in front of it.

    Raises:
        NotPlainData: If the message holds anything but text, bytes, booleans, numbers that fit
            into 64 bits, lists, dictionaries and ``None``.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotPlainData(str(error)) from error
    return HEADER.pack(len(body), call) + body
