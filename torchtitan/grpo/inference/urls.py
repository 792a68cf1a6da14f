# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""URLs of a run's servers, the file that lists them, and addresses in general.

The checks of the configuration use this module, so it imports little.
"""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.grpo.system.file_formats import other_format
from torchtitan.grpo.system.files import read_regular

if TYPE_CHECKING:
    from torchtitan.grpo.config import Inference

_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_LAST_PORT = 2**16 - 1

_Mark = tuple[int, int, int, int]


def checked_urls(urls: Sequence[str], source: str) -> list[str]:
    """Returns URLs in lower case, without a slash at the end.

    Raises ValueError if the list is empty, or if a URL is malformed or occurs twice.
    """
    checked = []
    for url in urls:
        try:
            checked.append(_checked_url(url))
        except ValueError as error:
            shown = re.sub(r"//[^/]*@", "//***@", url)  # it may hold a key
            raise ValueError(
                f"{source} must look like http://host:port, got {shown!r}: {error}."
            ) from error
    if not checked:
        raise ValueError(f"{source} must name at least one server, got none.")
    if twice := sorted({url for url in checked if checked.count(url) > 1}):
        raise ValueError(
            f"{source} must name each server once, got {', '.join(twice)} more than once."
        )
    return checked


def _checked_url(url: str) -> str:
    if re.search(r"[\s,]", url):
        raise ValueError("it holds a space or a comma, so it is more than one URL, or none")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise ValueError("it must begin with http:// or https://")
    if "@" in rest:
        raise ValueError("keys are set with inference.api_key and inference.admin_key")
    address, *path = re.split(r"(?=[/?#])", rest, maxsplit=1)
    if path not in ([], ["/"]):
        raise ValueError(
            f"the paths below it are the client's part, so {path[0]!r} must be left out"
        )
    return url_of(*split_address(address), scheme.lower())


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port. Raises ValueError with a reason that the caller appends to a sentence."""
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):
        raise ValueError("the port is missing")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f"the port must be a number from 1 to {_LAST_PORT}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"an IPv6 address stands in brackets, as in [{host}]:{port}")
    if host.startswith("["):
        return ipaddress.IPv6Address(host[1:-1]).compressed, int(port)
    return checked_host(host), int(port)


def checked_host(host: str) -> str:
    """Returns a host name in lower case, or a normalized IP address. Raises like :func:`split_address`."""
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        return ipaddress.ip_address(host).compressed
    if _NAME.fullmatch(host.lower()) is None:
        raise ValueError(f"{host!r} is no name of a host" if host else "the host is missing")
    return host.lower()


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def parse_urls(text: str, source: str) -> list[str]:
    """Reads URLs, one in each line. Ignores empty lines and # comments."""
    lines = (line.strip() for line in text.splitlines())
    return checked_urls([s for s in lines if s and not s.startswith("#")], source)


def read_urls(path: Path) -> list[str]:
    source = f"inference.urls_file ({path})"
    try:
        content = read_regular(path)
    except OSError as error:
        raise ValueError(f"{source} must be a readable text file: {error}.") from error
    if found := other_format(content, str(path)):
        raise ValueError(f"{source} must be a readable text file: {found}")
    return parse_urls(content.decode("utf-8-sig"), source)


def named_urls(inference: "Inference") -> list[str]:
    """Returns the URLs that ``[inference]`` names, or [] if ``urls_file`` is missing. (Only rank 0 needs it.)"""
    if inference.urls_file is None:
        return checked_urls(inference.urls, "inference.urls") if inference.urls else []
    path = Path(inference.urls_file)
    return read_urls(path) if path.exists() else []


class UrlsFile:
    """Follows the changes of ``inference.urls_file``.

    A file that is written in place may look complete for a moment (``:80`` of ``:8000``). So
    :meth:`poll` reports a change only when two successive calls have found the same new state.
    """

    name = "inference.urls_file"

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._taken: _Mark | None = None
        self._moving: _Mark | None = None

    def read(self) -> list[str]:
        """Returns the URLs now in the file, or raises ValueError. :meth:`poll` then reports only later changes."""
        # Before the file is read, so that a write during the read counts as a change.
        self._taken = self._moving = self._mark()
        return read_urls(self._path)

    def poll(self) -> list[str] | None:
        """Returns the URLs if the file has changed, else None. Raises ValueError once if the new file is bad."""
        mark = self._mark()
        stands_still, self._moving = mark == self._moving, mark
        if mark == self._taken or not stands_still:
            return None
        return self.read()

    def _mark(self) -> _Mark | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
