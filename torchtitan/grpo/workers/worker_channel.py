# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The worker's end of the pipe: requests come in, replies go out, user code sees neither."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, Generic, TypeVar, cast

from torchtitan.grpo.workers.frames import HEADER, pack_frame

Request = TypeVar("Request")


class WorkerChannel(Generic[Request]):
    """Takes over stdin and stdout of the process for requests and replies.

    Afterwards user code that reads stdin finds it empty, and what user code prints goes to
    stderr, which is the log of the rollout process. Create the channel before any user code runs.

    Args:
        decode: Decodes the body of a request.
    """

    def __init__(self, decode: Callable[[bytes], Request]) -> None:
        self._decode = decode
        # Cluster managers send SIGTERM to all processes of a job at once. What is being computed then
        # belongs to the checkpoint with which the run stops, and the owner ends this process after it.
        # A handler, because a program that user code starts would inherit that a signal is ignored.
        signal.signal(signal.SIGTERM, lambda *_: None)
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
        """Sends the reply to a call. Any thread may call this method.

        Raises:
            NotPlainData: If the message cannot be encoded. Nothing is sent then.
        """
        frame = pack_frame(call, message)
        with self._lock:
            self._replies.write(frame)
            self._replies.flush()
