# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Owns the process that renders chat templates, with limits of time, memory and text.

A template may loop, or double a string, and nothing in this process could end it. A process of its
own can be ended, and it spares this one the import of transformers.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.workers.surroundings import Surroundings

_MODULE = "torchtitan.grpo.rollout.template_renderer"
_CPU_SECONDS = 10.0
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**20  # besides a multiple of those of the messages
_TIMES_LONGER = 8
# Of waiting for one answer. The process may import transformers first, on a busy machine.
_WAIT_SECONDS = 300.0
_EXIT_SECONDS = 10.0


class LimitReached(ValueError):
    """A template took too much of something, which the message names."""


class TemplateProcess:
    """Renders in a child process, which is started when it is first needed.

    Any thread may use it; one rendering runs at a time. The child ends when :meth:`close` is called,
    or when this process has ended, whose end of the socket then closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def ask(self, request: dict[str, Any]) -> str | None:
        """Returns the text that the child answers to a request of `template_renderer.py`.

        Raises:
            LimitReached: If the template has reached a limit.
            ValueError: If the template raises, or there is no tokenizer.
            TimeoutError: If the child does not answer.
            RuntimeError: If the child ends for another reason, twice.
        """
        limits = {
            "cpu_seconds": _CPU_SECONDS,
            "memory_bytes": _MEMORY_BYTES,
            "most_characters": _MOST_CHARACTERS + _TIMES_LONGER * len(str(request["messages"])),
        }
        with self._lock:
            # Somebody else may have ended the child, for example for want of memory.
            found = self._exchange(request | limits) or self._exchange(request | limits)
        if found is None:
            raise RuntimeError(
                "The process that renders the chat template was ended twice. See the machine's log: "
                "it may be short of memory."
            )
        if "limit" in found:
            raise LimitReached(found["limit"])
        if "error" in found:
            raise ValueError(found["error"])
        return found["text"]

    def close(self) -> None:
        """Ends the child. It is idempotent; a later request starts another one."""
        with self._lock:
            self._end()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the answer, or ``None`` if the child has ended without one."""
        if self._connection is None:
            self._connection = self._start()
        try:
            self._connection.send(request)
            if not self._connection.poll(_WAIT_SECONDS):
                self._end()
                raise TimeoutError(
                    f"The process that renders the chat template of {request['path']} did not answer "
                    f"within {_WAIT_SECONDS:g} s. The machine may be overloaded."
                )
            return json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            status = self._end()
        if status == -signal.SIGPROF:
            return {"limit": f"{request['cpu_seconds']:g} s of processor time"}
        return None

    def _start(self) -> Connection:
        own, childs = Pipe()
        environment = Surroundings().environment(os.environ)
        with childs:
            self._child = subprocess.Popen(
                [*LIGHT_PYTHON, _MODULE, str(childs.fileno())],
                env=environment | {"TRANSFORMERS_VERBOSITY": "error"},
                stdin=subprocess.DEVNULL,
                pass_fds=[childs.fileno()],
                start_new_session=True,
            )
        return own

    def _end(self) -> int | None:
        """Ends the child, and returns its exit status, that of its own end if it had ended."""
        child, self._child = self._child, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if child is None:
            return None
        # It has closed its socket, or reads that it is closed; a template that runs does neither.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=1.0)
        child.kill()
        return child.wait(timeout=_EXIT_SECONDS)


@functools.cache
def template_process() -> TemplateProcess:
    """Returns the process that renders all templates of this one."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process
