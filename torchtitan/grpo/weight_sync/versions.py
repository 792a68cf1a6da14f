# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which versions the source ranks hold, seen from the leader.

    begun --> newest --> held by lanes that send it --> dropped by the sources

A version is kept while it is the newest or a lane sends it. A version that a lane has sent
is wanted as the base of a delta, too, but gives way when room is needed: the next push is
then a whole one. So at most ``max_alive`` versions have buffers, whatever servers do.

Belongs to the leader's event loop; no locks.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


class Versions:
    """See the module's docstring.

    Args:
        max_alive: How many may have buffers at once, at least 2.
        drop: Makes all sources let go of a version; returns when its buffers are free.
    """

    def __init__(self, max_alive: int, drop: Callable[[int], Awaitable[None]]) -> None:
        self.max_alive = max_alive
        self.newest = -1
        self._drop = drop
        self._alive: set[int] = set()
        self._sending: Counter[int] = Counter()
        self._bases: Counter[int] = Counter()
        self._dropping: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._error: Exception | None = None

    @property
    def num_alive(self) -> int:
        """Versions that have buffers, those that are being dropped included."""
        return len(self._alive)

    async def room(self, timeout_seconds: float) -> bool:
        """Whether a further version may be begun, waiting for that if need be."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(self._has_room)
            except TimeoutError:
                return False
        return True

    def _has_room(self) -> bool:
        if len(self._alive) < self.max_alive:
            return True
        # The oldest of those that are only bases give way; some may be on their way out.
        for version in sorted(self._alive - self._dropping.keys()):
            if len(self._alive) - len(self._dropping) < self.max_alive:
                break
            if version != self.newest and not self._sending[version]:
                self._start_dropping(version)
        return False

    async def begin(self, version: int) -> None:
        """The sources have begun to gather a version; it is the newest."""
        async with self._changed:
            former, self.newest = self.newest, version
            self._alive.add(version)
            self._maybe_drop(former)
            self._changed.notify_all()

    async def newer_than(self, version: int, timeout_seconds: float) -> int | None:
        """Waits for something newer than ``version``; None after the timeout."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(lambda: self.newest > version)
            except TimeoutError:
                return None
        return self.newest

    @contextmanager
    def sending(self, version: int) -> Iterator[None]:
        """Keeps a version while it is sent."""
        self._sending[version] += 1
        try:
            yield
        finally:
            self._sending[version] -= 1
            self._maybe_drop(version)

    def has(self, version: int) -> bool:
        """Whether a version can still be read."""
        return version in self._alive and version not in self._dropping

    def want_base(self, version: int) -> None:
        """A lane would like to send changes to this version next."""
        self._bases[version] += 1

    def release_base(self, version: int) -> None:
        """Undoes one :meth:`want_base`."""
        self._bases[version] -= 1
        self._maybe_drop(version)

    async def close(self) -> None:
        """Gives up what is being dropped."""
        for task in self._dropping.values():
            task.cancel()
        await asyncio.gather(*self._dropping.values(), return_exceptions=True)

    def _maybe_drop(self, version: int) -> None:
        is_wanted = version == self.newest or self._sending[version] or self._bases[version]
        if not is_wanted and self.has(version):
            self._start_dropping(version)

    def _start_dropping(self, version: int) -> None:
        self._dropping[version] = asyncio.create_task(self._finish_dropping(version))

    def raise_if_failed(self) -> None:
        """Raises what kept a version from being dropped: its place would be lost for good."""
        if self._error is not None:
            raise self._error

    async def _finish_dropping(self, version: int) -> None:
        try:
            await self._drop(version)
        except Exception as error:  # the task's boundary: the leader raises it
            self._error = error
            return
        async with self._changed:
            self._alive.discard(version)
            del self._dropping[version]
            self._changed.notify_all()
