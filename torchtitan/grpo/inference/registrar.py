# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a server that registers itself once it is up, and leaves when it ends.

`serve --register` names either a folder that server and trainer share, or ``http://host:port``, the
registry of the trainer's rank 0 (``inference.registry_address``). See `registry.py`.
"""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import NoReturn

from torchtitan.grpo.inference.registry import BEAT_SECONDS, Registration, RegistryFolder
from torchtitan.grpo.system.child import start_child, stop_children

SERVERS_ROUTE = "/servers"
_REQUEST_SECONDS = 5.0
_STOP_SECONDS = 5.0


class _Stopped(Exception):
    """The process was asked to end."""


class Registrar:
    """Registers one server again and again.

    Args:
        target: A folder, or the URL of a registry.
        registration: The server.
        key: Key of the registry; a folder needs none.
    """

    def __init__(self, target: str, registration: Registration, key: str | None) -> None:
        self._target, self._registration, self._key = target, registration, key
        self._is_registered = False
        self._trouble = ""

    def beat(self) -> None:
        """Registers the server. A failure is reported once, and the next beat tries again."""
        self._registration = self._registration.next()
        try:
            self._send("PUT", self._registration)
        except (OSError, http.client.HTTPException) as error:
            self._is_registered = False
            if str(error) != self._trouble:
                self._trouble = str(error)
                _say(f"cannot register at {self._target}: {_reason(error)}. It is tried again.")
            return
        self._trouble = ""
        if not self._is_registered:
            self._is_registered = True
            _say(f"{self._registration.url} is registered at {self._target}")

    def leave(self) -> None:
        """Takes the server out of the registry, if it can be reached."""
        try:
            self._send("DELETE", self._registration)
        except (OSError, http.client.HTTPException) as error:
            _say(f"cannot leave {self._target}: {_reason(error)}. It counts as dead in 30 s.")

    def _send(self, method: str, registration: Registration) -> None:
        if not self._target.startswith(("http://", "https://")):
            folder = RegistryFolder(self._target)
            (folder.write if method == "PUT" else folder.remove)(registration)
            return
        request = urllib.request.Request(
            self._target.rstrip("/") + SERVERS_ROUTE,
            json.dumps(asdict(registration), allow_nan=False).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
            method=method,
        )
        _open(request)


def _open(request: urllib.request.Request | str) -> None:
    # Without a proxy, as the trainer reaches the servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_REQUEST_SECONDS) as answer:
        answer.read()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError):
            return f"{error}: {error.read(500).decode(errors='replace')}"
    return f"{type(error).__name__}: {error}"


def run_registered(
    command: Sequence[str], environ: Mapping[str, str], registrar: Registrar, url: str
) -> int:
    """Runs a server until it ends or this process is asked to; returns the exit status.

    Args:
        command: Command line of the server.
        environ: Environment of the server.
        registrar: Registers it.
        url: Where it will answer.
    """

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    server = start_child(command, env=dict(environ))
    is_up = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(timeout=BEAT_SECONDS)
            is_up = is_up or _answers(url)
            if is_up:
                registrar.beat()
    except _Stopped:
        return 0
    finally:
        if is_up:
            registrar.leave()  # first, so that no request is sent to a server that ends
        stop_children([server], _STOP_SECONDS)


def _answers(url: str) -> bool:
    try:
        _open(f"{url}/health")
    except (OSError, http.client.HTTPException):
        return False
    return True


def _say(text: str) -> None:
    print(f"[register] {text}", file=sys.stderr, flush=True)
