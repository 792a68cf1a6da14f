# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""URLs of servers: how they look, and the file that names those of a run.

Nothing but the standard library is needed: the configuration's checks use it, too.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.grpo.config import Inference

_URL = re.compile(r"https?://[^/\s]+:\d+/?")
_COMMENT = "#"

_Mark = tuple[int, int, int, int]


def checked_urls(urls: Sequence[str], source: str) -> list[str]:
    """The URLs without closing slashes.

    Args:
        urls: As written by the user.
        source: Where they stand, for the message: ``inference.urls``.

    Raises:
        ValueError: There is none, one is not ``http://host:port``, or one comes twice.
    """
    for url in urls:
        if _URL.fullmatch(url) is None:
            raise ValueError(f"{source} must look like http://host:port, got {url!r}.")
    checked = [url.rstrip("/") for url in urls]
    if not checked:
        raise ValueError(f"{source} must name at least one server, got none.")
    if twice := sorted({url for url in checked if checked.count(url) > 1}):
        raise ValueError(f"{source} must name each server once, got {', '.join(twice)} again.")
    return checked


def parse_urls(text: str, source: str) -> list[str]:
    """Reads one URL a line; empty lines and those that begin with # are passed over.

    Raises:
        ValueError: As :func:`checked_urls`.
    """
    lines = (line.strip() for line in text.splitlines())
    return checked_urls([s for s in lines if s and not s.startswith(_COMMENT)], source)


def read_urls(path: Path) -> list[str]:
    """Reads ``inference.urls_file``.

    Raises:
        ValueError: It cannot be read, or see :func:`parse_urls`.
    """
    source = f"inference.urls_file ({path})"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} must be a readable text file: {error}.") from error
    return parse_urls(text, source)


def named_urls(inference: "Inference") -> list[str]:
    """The URLs that ``[inference]`` names now; none where servers are launched.

    None either where ``inference.urls_file`` is not on this machine: rank 0 alone needs it.

    Raises:
        ValueError: As :func:`read_urls`.
    """
    if inference.urls_file is None:
        return inference.urls
    path = Path(inference.urls_file)
    return read_urls(path) if path.is_file() else []


class UrlsFile:
    """``inference.urls_file``, followed while it changes.

    A file may be replaced by a rename or written in place. In place it is half-written for a
    moment, and the half may look whole (``:80`` of ``:8000``), so :meth:`poll` takes a change
    only when the file stood still from one call to the next.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._taken: _Mark | None = None
        self._moving: _Mark | None = None

    def read(self) -> list[str]:
        """What the file says now.

        Raises:
            ValueError: It names no servers; :meth:`poll` is silent about it until it changes.
        """
        # Before it is read: what is written meanwhile is then seen as a change.
        self._taken = self._moving = self._mark()
        return read_urls(self._path)

    def poll(self) -> list[str] | None:
        """What the file says where it has changed since it was read, else None.

        Raises:
            ValueError: It names no servers; once for each change.
        """
        mark = self._mark()
        stands_still, self._moving = mark == self._moving, mark
        if mark == self._taken or not stands_still:
            return None
        return self.read()

    def _mark(self) -> _Mark | None:
        """Tells one state of the file from another; None while there is no file."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
