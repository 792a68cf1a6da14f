# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The URLs of a run's servers, and the file that lists them.

The checks of the configuration use this module, so it needs the standard library alone.
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
    """Returns the URLs without trailing slashes.

    Args:
        urls: URLs as written by the user.
        source: TOML key or file that holds them, for the error message.

    Raises:
        ValueError: If there is no URL, if one is not ``http://host:port``, or if one is
            repeated.
    """
    for url in urls:
        if _URL.fullmatch(url) is None:
            raise ValueError(f"{source} must look like http://host:port, got {url!r}.")
    checked = [url.rstrip("/") for url in urls]
    if not checked:
        raise ValueError(f"{source} must name at least one server, got none.")
    if twice := sorted({url for url in checked if checked.count(url) > 1}):
        raise ValueError(
            f"{source} must name each server once, got {', '.join(twice)} more than once."
        )
    return checked


def parse_urls(text: str, source: str) -> list[str]:
    """Returns the URLs of a text with one URL a line. Empty lines and # comments are ignored.

    Raises:
        ValueError: If :func:`checked_urls` refuses the URLs.
    """
    lines = (line.strip() for line in text.splitlines())
    return checked_urls([s for s in lines if s and not s.startswith(_COMMENT)], source)


def read_urls(path: Path) -> list[str]:
    """Reads ``inference.urls_file``.

    Raises:
        ValueError: If the file cannot be read; see also :func:`checked_urls`.
    """
    source = f"inference.urls_file ({path})"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} must be a readable text file: {error}.") from error
    return parse_urls(text, source)


def named_urls(inference: "Inference") -> list[str]:
    """Returns the URLs that ``[inference]`` names now.

    The list is empty if servers are launched or register themselves, or if ``inference.urls_file`` does not exist on
    this machine, because rank 0 alone needs the file.

    Raises:
        ValueError: If :func:`read_urls` refuses the file.
    """
    if inference.urls_file is None:
        return inference.urls
    path = Path(inference.urls_file)
    return read_urls(path) if path.is_file() else []


class UrlsFile:
    """Follows the changes of ``inference.urls_file``.

    A file may be replaced by a rename or written in place. A file that is written in place is
    incomplete for a moment and may still look complete (``:80`` of ``:8000``). :meth:`poll`
    therefore reports a change only after the file was the same in two successive calls.
    """

    name = "inference.urls_file"

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._taken: _Mark | None = None
        self._moving: _Mark | None = None

    def read(self) -> list[str]:
        """Returns the URLs that the file holds now.

        Raises:
            ValueError: If the file names no servers. :meth:`poll` does not report this state of
                the file again.
        """
        # Before the file is read, so that a write during the read counts as a change.
        self._taken = self._moving = self._mark()
        return read_urls(self._path)

    def poll(self) -> list[str] | None:
        """Returns the URLs if the file has changed since it was read, else ``None``.

        Raises:
            ValueError: If the changed file names no servers; raised once for each change.
        """
        mark = self._mark()
        stands_still, self._moving = mark == self._moving, mark
        if mark == self._taken or not stands_still:
            return None
        return self.read()

    def _mark(self) -> _Mark | None:
        """Identifies the state of the file; ``None`` while there is no file."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
