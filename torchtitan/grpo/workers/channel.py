# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The pipe between a worker process and its owner.

A frame is a header with the length of the body in bytes and the number of a call, then a msgpack
body. A worker copies the call's number from the request to the reply, so a late reply is never taken
for the reply to a newer call.
"""

import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from torchtitan.grpo.system.stop import stop_signals

if TYPE_CHECKING:
    from torchtitan.grpo.types import Prompt

Request = TypeVar("Request")

HEADER = struct.Struct("<IQ")
PLAIN_DATA = (
    "Columns may hold plain data only: text, numbers, lists and dictionaries. Convert or remove the column "
    "in the data set."
)

_encoder = msgspec.msgpack.Encoder()
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


class NotPlainData(ValueError):
    """A message holds an object that msgpack cannot represent."""


class Refused(msgspec.Struct, tag=True):
    """Reply to a request that failed; failures of one ``kind`` are counted together."""

    kind: str
    message: str


def refused(kind: str, message: str, reply: type[Refused] = Refused) -> Refused:
    """Makes a :class:`Refused` from texts of user code, with characters escaped that cannot be sent."""
    return reply(*(text.encode(errors="backslashreplace").decode() for text in (kind, message)))


def unsendable_column(columns: Mapping[str, Any]) -> str | None:
    """Names the first column that cannot be sent and says why; None if all columns can be sent.

    Example: ``column 'image': Encoding objects of type PngImageFile is unsupported``.
    """
    for name, value in columns.items():
        try:
            _encoder.encode(value)
        except _UNENCODABLE as error:
            return f"column {name!r}: {error}"
    return None


def not_passed(prompt: "Prompt", columns: Mapping[str, Any], to: str, error: NotPlainData) -> str:
    return (
        f"Prompt {prompt.group_id} ({prompt.text!r:.80}) cannot be passed to {to}: "
        f"{unsendable_column(columns) or error}. {PLAIN_DATA}"
    )


def pack_frame(call: int, message: Any) -> bytes:
    """Makes a frame. Raises :class:`NotPlainData` if msgpack cannot encode the message."""
    try:
        body = _encoder.encode(message)
    except _UNENCODABLE as error:
        raise NotPlainData(str(error)) from error
    return HEADER.pack(len(body), call) + body


class WorkerChannel(Generic[Request]):
    """The worker's end: takes over stdin and stdout of the process for requests and replies.

    User code, which runs later, finds stdin empty. What it prints goes to the rollout process's log.
    """

    def __init__(self, decode: Callable[[bytes], Request]) -> None:
        self._decode = decode
        # Cluster managers send signals to all processes of a job at once. What is being computed then
        # belongs to the checkpoint with which the run stops, and the owner ends this process after it.
        # A handler, because a program that user code starts would inherit that a signal is ignored.
        for signum in stop_signals():
            signal.signal(signum, lambda *_: None)
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        # Python refuses to print half of a surrogate pair to stdout, and not to stderr.
        cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")

    def read(self) -> tuple[int, Request] | None:
        """Returns the next call's number and request, or ``None`` if the owner closed the pipe."""
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        length, call = HEADER.unpack(header)
        body = self._requests.read(length)
        return (call, self._decode(body)) if len(body) == length else None

    def reply(self, call: int, message: Any) -> None:
        """Sends the reply to a call; raises NotPlainData before anything is sent. Thread-safe."""
        frame = pack_frame(call, message)
        with self._lock:
            self._replies.write(frame)
            self._replies.flush()
