# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The servers that have registered themselves, each in a file of one folder.

A server writes its file on a shared disk, or sends it to the trainer over HTTP
(`rollout/serving/registry_server.py`). The folder outlives the trainer's processes.

A living server writes its file every two seconds, each time with a higher number. A server counts as alive
once the reader has *seen* its number change, and as dead after 30 s without a change by the reader's clock.
So hosts' clocks are not compared, and files of killed servers or earlier runs do not count.
"""

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchtitan.grpo.inference.urls import checked_urls
from torchtitan.grpo.system.files import open_regular
from torchtitan.grpo.types import ServerKind

if TYPE_CHECKING:
    from torchtitan.grpo.config import Inference

BEAT_SECONDS = 2.0
DEAD_SECONDS = 30.0
"""Allowed silence of a server, longer than a disk or a link should need to come back."""
_MAX_BYTES = 4096
_MAX_SERVERS = 4096


@dataclass(frozen=True)
class Registration:
    """A server's registration. ``started`` is the server's time; ``beat`` grows each time it is renewed."""

    url: str
    kind: ServerKind
    host: str
    pid: int
    started: float
    beat: int = 0

    def next(self) -> "Registration":
        return replace(self, beat=self.beat + 1)


def parse_registration(content: bytes) -> Registration:
    """Parses the content of a server's file. Raises ValueError if it is malformed."""
    wanted = "A registration must be a JSON object with url, kind, host, pid, started and beat"
    try:
        found = Registration(**json.loads(content))
        msgspec.convert(asdict(found), Registration)
    except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise ValueError(f"{wanted}: {error}.") from error
    checked_urls([found.url], "The url of a registration")
    return found


def registry_folder(inference: "Inference", dump_folder: str) -> str | None:
    """Returns the folder where servers register, or ``None`` if the run's servers do not register."""
    if inference.registry is None and inference.registry_address is not None:
        return f"{dump_folder}/registry"
    return inference.registry


class RegistryFolder:
    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, registration: Registration) -> None:
        # Whoever can write here is sent prompts and the servers' keys.
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._path, prefix=".part-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(registration), file, allow_nan=False)
            os.replace(name, self._file(registration.url))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def remove(self, registration: Registration) -> None:
        """Removes the file of a server, unless another process has taken over its URL."""
        file = self._file(registration.url)
        found = _read(file)
        if found is not None and replace(found, beat=registration.beat) == registration:
            file.unlink(missing_ok=True)

    def read(self) -> list[Registration]:
        """Returns all registrations. Malformed files and a missing folder are ignored."""
        files = sorted(self._path.glob("*.json"))[:_MAX_SERVERS]
        return [found for file in files if (found := _read(file)) is not None]

    def _file(self, url: str) -> Path:
        name = re.sub(r"[^0-9A-Za-z.-]", "_", url.partition("://")[2].rstrip("/"))
        return self._path / f"{name}.json"


def _read(file: Path) -> Registration | None:
    try:
        with open_regular(file) as opened:
            return parse_registration(opened.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None


class RegisteredServers:
    """Tracks the servers of one kind that register in a folder. ``clock`` must never go back."""

    name = "inference.registry"

    def __init__(
        self, path: str | Path, kind: ServerKind, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._kind, self._clock = RegistryFolder(path), kind, clock
        self._is_first = True
        # By URL: the last beat, and when it was seen to arrive; ``None`` if it was there before.
        self._beats: dict[str, tuple[Registration, float | None]] = {}
        self._taken: list[str] = []

    def read(self) -> list[str]:
        """Returns the URLs of the living servers. Raises ValueError if there is none."""
        return checked_urls(self._living(), self.name)

    def poll(self) -> list[str] | None:
        """Returns the URLs of the living servers if they have changed since the last call, else ``None``.

        Never returns an empty list: if no server is alive, the run keeps the servers that it has.
        """
        living = self._living()
        if not living or living == self._taken:
            return None
        self._taken = living
        return living

    def _living(self) -> list[str]:
        """Reads the folder. Returns the URLs of servers whose ``beat`` was seen to change in the last 30 s."""
        now, before, self._beats = self._clock(), self._beats, {}
        for one in self._folder.read():
            if one.kind != self._kind:
                continue
            known = before.get(one.url)
            if known is not None and known[0] == one:
                self._beats[one.url] = known
            else:
                was_there = known is None and self._is_first
                self._beats[one.url] = one, None if was_there else now
        self._is_first = False
        return [
            u for u, (_, at) in self._beats.items() if at is not None and now - at <= DEAD_SECONDS
        ]
