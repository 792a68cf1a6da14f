# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a server that registers itself once it is up, and leaves the registry when it ends.

The registry is a shared folder, or ``http://host:port`` of the trainer's rank 0; see `registry.py`.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import NoReturn

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.registry import BEAT_SECONDS, Registration, RegistryFolder
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.stop import stop_signals

_REQUEST_SECONDS = 5.0
_STOP_SECONDS = 5.0


class _Stopped(KeyboardInterrupt):
    """The process was asked to end. (An event loop would swallow any other exception of a handler.)"""


class Registrar:
    """Registers one server repeatedly, in a folder or at a registry's URL, which needs a key."""

    def __init__(self, target: str, registration: Registration, key: str | None) -> None:
        self._target, self._registration, self._key = target, registration, key
        self._said = ""

    def beat(self) -> None:
        """Registers the server. A failure is reported once, and the next beat tries again."""
        self._registration = self._registration.next()
        try:
            self._send("PUT")
            text = f"{self._registration.url} is registered at {self._target}"
        except (OSError, ServerError) as error:
            text = (
                f"cannot register at {self._target}: {type(error).__name__}: {error}. It is tried "
                "again."
            )
        if text != self._said:
            self._said = text
            _say(text)

    def leave(self) -> None:
        """Removes the server from the registry, if it can be reached."""
        try:
            self._send("DELETE")
        except (OSError, ServerError) as error:
            _say(
                f"cannot leave {self._target}: {type(error).__name__}: {error}. It counts as dead in 30 s."
            )

    def _send(self, method: str) -> None:
        if self._target.startswith(("http://", "https://")):
            request(self._target, method, "/servers", asdict(self._registration), self._key)
            return
        folder = RegistryFolder(self._target)
        (folder.write if method == "PUT" else folder.remove)(self._registration)


def request(url: str, method: str, route: str, body: object = None, key: str | None = None) -> None:
    """Sends a request as the trainer does; raises ServerError if it is not granted in time."""

    async def send() -> None:
        connection = HttpConnection(
            url, api_key=key, admin_key=key, timeout_seconds=_REQUEST_SECONDS
        )
        try:
            await connection.request(method, route, body)
        finally:
            await connection.close()

    asyncio.run(send())


def run_registered(
    command: Sequence[str], environ: Mapping[str, str], registrar: Registrar, url: str
) -> int:
    """Runs a server at ``url`` until it ends or this process is asked to; returns its status."""

    handled = stop_signals()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    for signum in handled:
        signal.signal(signum, stop)
    server = start_child(command, env=dict(environ))
    is_up = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(timeout=BEAT_SECONDS)
            if not is_up:
                with contextlib.suppress(ServerError):
                    request(url, "GET", "/health")
                    is_up = True
            if is_up:
                registrar.beat()
    except _Stopped:
        return 0
    finally:
        if is_up:
            registrar.leave()  # first, so that no request is sent to a server that ends
        stop_children([server], _STOP_SECONDS)


def _say(text: str) -> None:
    print(f"[register] {text}", file=sys.stderr, flush=True)
