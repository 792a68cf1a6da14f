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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

from torchtitan.grpo.inference.registry import BEAT_SECONDS, Registration, RegistryFolder
from torchtitan.grpo.system.child import start_child, stop_children

SERVERS_ROUTE = "/servers"
_REQUEST_SECONDS = 5.0
_EXCERPT_BYTES = 500
_STOP_SECONDS = 5.0


class _Stopped(Exception):
    """The process was asked to end."""


class Registrar:
    """Registers one server again and again, in a folder or at the URL of a registry, which needs a key."""

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
                _say(
                    f"cannot register at {self._target}: {type(error).__name__}: {error}. It is tried again."
                )
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
            _say(
                f"cannot leave {self._target}: {type(error).__name__}: {error}. It counts as dead in 30 s."
            )

    def _send(self, method: str, registration: Registration) -> None:
        if not self._target.startswith(("http://", "https://")):
            folder = RegistryFolder(self._target)
            (folder.write if method == "PUT" else folder.remove)(registration)
            return
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        body = json.dumps(asdict(registration), allow_nan=False).encode()
        _exchange(method, self._target.rstrip("/") + SERVERS_ROUTE, body, headers)


def _exchange(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Sends a request, without a proxy, as the trainer reaches the servers, and follows no redirection.

    Raises OSError if there is no answer in time, or one that does not grant the request.
    """
    address = urlsplit(url)
    is_https = address.scheme == "https"
    kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
    connection = kind(address.netloc, timeout=_REQUEST_SECONDS)
    connection.connect()
    # The timeout of the socket begins anew with each byte of an answer, so a timer ends the connection.
    deadline = time.monotonic() + _REQUEST_SECONDS
    limit = threading.Timer(_REQUEST_SECONDS, _end, [connection.sock])
    limit.name, limit.daemon = "request-limit", True
    limit.start()
    too_late = TimeoutError(f"no whole answer within {_REQUEST_SECONDS:g} s")
    try:
        connection.request(method, address.path or "/", body, dict(headers or {}))
        answer = connection.getresponse()
        text = answer.read(_EXCERPT_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= deadline:
            raise too_late from error
        raise
    finally:
        limit.cancel()
        connection.close()
    if time.monotonic() >= deadline:  # the end of the connection may look like the answer's
        raise too_late
    if not 200 <= answer.status < 300:
        where = answer.getheader("Location")
        pointing = f", a redirection to {where!r:.300}, which is not followed" if where else ""
        raise OSError(f"it answered {answer.status}{pointing}: {text}")


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just been closed
        connection.shutdown(socket.SHUT_RDWR)


def run_registered(
    command: Sequence[str], environ: Mapping[str, str], registrar: Registrar, url: str
) -> int:
    """Runs a server, which will answer at ``url``, until it ends or this process is asked to; returns the status."""

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
        _exchange("GET", f"{url}/health")
    except (OSError, http.client.HTTPException):
        return False
    return True


def _say(text: str) -> None:
    print(f"[register] {text}", file=sys.stderr, flush=True)
