# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides whether a server answers a request, by its origin, its form and its key.

All kinds of servers ask it, vLLM and SGLang through `guard.py` in their own environments, so it
imports little. Any page in a browser on the server's machine can make the browser send requests.
Such a request names a foreign page in ``Origin``, or a foreign name in ``Host`` (DNS rebinding), or
cannot have a JSON body. All three are refused, also on servers without keys.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from torchtitan.grpo.system.network import is_loopback

API_KEY_VARIABLE = "TORCHTITAN_GRPO_API_KEY"
TEACHER_KEY_VARIABLE = "TORCHTITAN_GRPO_TEACHER_KEY"
ADMIN_KEY_VARIABLE = "TORCHTITAN_GRPO_ADMIN_KEY"

_METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_JSON = "application/json"
# What clients write for a body that they do not have.
_NO_TYPE = ("", "application/octet-stream")


class AuthLevel(Enum):
    """Key of a route: none, the API key, or the admin key (the API key if no admin key is set)."""

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


@dataclass(frozen=True)
class Keys:
    api_key: str | None = None
    admin_key: str | None = None

    def of(self, level: AuthLevel) -> str | None:
        if level is AuthLevel.OPEN:
            return None
        return (self.admin_key or self.api_key) if level is AuthLevel.CONTROL else self.api_key


def keys_of_environment() -> Keys:
    return Keys(os.environ.get(API_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str


def refusal(
    level: AuthLevel,
    keys: Keys,
    *,
    method: str,
    headers: Mapping[str, str],
    local_address: str | None,
) -> Refusal | None:
    """Returns why a request is refused, if it is. ``local_address`` is ``None`` for a Unix socket."""
    is_local = is_loopback(local_address)
    host = headers.get("host", "")
    if is_local and not _is_own_name(host):
        return Refusal(
            403, f"Host must be this machine's own name or a loopback address, got {host!r:.80}."
        )
    if (found := _foreign_page(headers, host)) is not None:
        return Refusal(403, f"Requests of other web pages are refused, got {found}.")
    expected = keys.of(level)
    if level is not AuthLevel.OPEN and not is_local and not expected:
        return Refusal(
            403,
            "Without a key for it, this route answers on the loopback interface alone. Start the "
            f"server with {API_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE} in its environment.",
        )
    if expected and not _is_bearer(headers.get("authorization", ""), expected):
        name = "admin key" if level is AuthLevel.CONTROL and keys.admin_key else "API key"
        return Refusal(401, f"Unauthorized: send 'Authorization: Bearer KEY' with the {name}.")
    return _wrong_content(method, headers)


def _is_bearer(authorization: str, expected: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    sent = token.encode(errors="surrogateescape")  # headers may hold any bytes
    return scheme.lower() == "bearer" and secrets.compare_digest(sent, expected.encode())


def require_keys(host: str, environ: Mapping[str, str]) -> None:
    if not is_loopback(host) and not environ.get(API_KEY_VARIABLE):
        raise ValueError(
            f"--host {host} needs keys, because every machine that reaches this one could otherwise "
            f"replace the weights. Set {API_KEY_VARIABLE}, and {ADMIN_KEY_VARIABLE} for routes that "
            "control the server, in the environment of server and trainer, or serve on --host "
            "127.0.0.1."
        )


def _is_own_name(host: str) -> bool:
    if not host:
        return True  # a browser always sends one
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()


def _foreign_page(headers: Mapping[str, str], host: str) -> str | None:
    """The header that shows that a page of another server sent the request, if any."""
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        return f"Origin {origin!r:.80}"
    site = headers.get("sec-fetch-site")
    return f"Sec-Fetch-Site {site!r:.20}" if site in ("cross-site", "same-site") else None


def _netloc(url: str) -> str:
    """Host and port of a URL; empty if it has none (as the origin ``null``)."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _wrong_content(method: str, headers: Mapping[str, str]) -> Refusal | None:
    if method in _METHODS_WITHOUT_BODY:
        return None
    kind, _, parameters = headers.get("content-type", "").partition(";")
    kind, charset = kind.strip().lower(), _charset_of(parameters)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if kind != _JSON and (has_body or kind not in _NO_TYPE):
        return Refusal(415, f"Content-Type must be {_JSON}, got {kind or 'none'!r:.80}.")
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        return Refusal(415, f"The charset of Content-Type must be utf-8, got {charset!r:.80}.")
    return None


def _charset_of(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'").lower()
    return ""
