# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records where each version is. Rank 0 keeps this record for the whole run.

    published -> taken -> begun (the newest) -> sent by lanes -> dropped by the source ranks
    in a slot    slot SENDING                   slot HELD or FREE     slot FREE

Source ranks (:class:`PayloadPool`) and transports make no decisions: they keep the buffers and
files of a version until :class:`Versions` makes them drop it.

A version is kept while it is the newest or a lane sends it, and as the base of the next delta to
a server that has confirmed it. If room is needed, a base is dropped, and the next push to that
server sends everything. So at most ``max_alive`` versions have buffers, whatever servers do.

The training thread accesses only the slot table. Everything else belongs to the leader's event
loop and has no locks; any thread may read :attr:`ServerVersions.confirmed` and
:attr:`Versions.num_alive`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan.grpo.weight_sync.slots import SlotTable


@dataclass(eq=False)
class _Version:
    """A version that has buffers on source ranks.

    ``num_sending`` counts the pushes that send it, or a delta against it; ``num_bases`` the
    servers for which it is the base of the next delta.
    """

    number: int
    held_slot: int | None = None
    num_sending: int = 0
    num_bases: int = 0
    dropping: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class TakenSlot:
    """A slot to be gathered; ``is_held`` if it is held until the version is dropped."""

    slot: int
    version: int
    is_held: bool


class Versions:
    """Keeps buffers of at most ``max_alive`` versions (2 or more) at once; the limit may be changed.

    ``drop`` makes all source ranks and the transport drop a version, and returns when its
    buffers are free. ``newest`` is the newest version that was begun; -1 before the first.
    """

    def __init__(
        self, slots: SlotTable, max_alive: int, drop: Callable[[int], Awaitable[None]]
    ) -> None:
        self.max_alive = max_alive
        self.newest = -1
        self._slots, self._drop = slots, drop
        self._alive: dict[int, _Version] = {}
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="weight-slots")

    @property
    def num_alive(self) -> int:
        """Number of versions that have buffers, including those that are being dropped."""
        return len(self._alive)

    # -- from a slot to the source ranks -------------------------------------------------

    async def take_newest(self, timeout_seconds: float) -> TakenSlot | None:
        """Takes the newest filled slot; ``None`` if no slot is filled, or there is no room, in time."""
        if not await self.room(timeout_seconds):
            return None
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._waiting, self._slots.take_newest, timeout_seconds)
        return None if taken is None else TakenSlot(*taken, is_held=self._slots.can_hold())

    async def room(self, timeout_seconds: float) -> bool:
        return await self._comes_true(self._has_room, timeout_seconds)

    async def _comes_true(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(condition)
            except TimeoutError:
                return False
        return True

    def _has_room(self) -> bool:
        if len(self._alive) < self.max_alive:
            return True
        # The oldest versions that are only bases are dropped until enough versions are being dropped.
        kept = sorted(number for number, version in self._alive.items() if not version.dropping)
        num_kept = len(kept)
        for version in (self._alive[number] for number in kept):
            if num_kept < self.max_alive:
                break
            if version.number != self.newest and not version.num_sending:
                self._start_dropping(version)
                num_kept -= 1
        return False

    async def begin(self, number: int) -> None:
        """Makes a version the newest, because the source ranks have begun to gather it."""
        async with self._changed:
            former, self.newest = self._alive.get(self.newest), number
            self._alive[number] = _Version(number)
            if former is not None:
                self._maybe_drop(former)
            self._changed.notify_all()

    def gathered(self, taken: TakenSlot) -> None:
        """Holds or releases a taken slot, after all ranks have read it."""
        if taken.is_held:
            self._slots.hold(taken.slot)
            self._alive[taken.version].held_slot = taken.slot
        else:
            self._slots.release(taken.slot)

    # -- from the source ranks to the servers --------------------------------------------

    async def newer_than(self, number: int, timeout_seconds: float) -> int | None:
        """Waits for a version newer than ``number``. Returns the newest version, or ``None`` if too late."""
        is_there = await self._comes_true(lambda: self.newest > number, timeout_seconds)
        return self.newest if is_there else None

    @contextmanager
    def sending(self, number: int) -> Iterator[None]:
        """Keeps a version while it, or a delta against it, is being sent."""
        version = self._alive[number]
        version.num_sending += 1
        try:
            yield
        finally:
            version.num_sending -= 1
            self._maybe_drop(version)

    def has(self, number: int) -> bool:
        version = self._alive.get(number)
        return version is not None and version.dropping is None

    def want_base(self, number: int) -> None:
        self._alive[number].num_bases += 1

    def release_base(self, number: int) -> None:
        """Undoes :meth:`want_base`. The version may have been dropped meanwhile."""
        version = self._alive.get(number)
        if version is not None:
            version.num_bases -= 1
            self._maybe_drop(version)

    # -- dropping ------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raises any error that kept a version from being dropped. Its buffers are lost for the run."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        tasks = [version.dropping for version in self._alive.values() if version.dropping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _maybe_drop(self, version: _Version) -> None:
        is_wanted = version.number == self.newest or version.num_sending or version.num_bases
        if not is_wanted and self.has(version.number):
            self._start_dropping(version)

    def _start_dropping(self, version: _Version) -> None:
        version.dropping = asyncio.create_task(self._finish_dropping(version))

    async def _finish_dropping(self, version: _Version) -> None:
        try:
            await self._drop(version.number)
            if version.held_slot is not None:
                self._slots.release(version.held_slot)
        except Exception as error:  # the task's boundary: the leader raises it
            self._error = error
            return
        async with self._changed:
            del self._alive[version.number]
            self._changed.notify_all()


class ServerVersions:
    """A server's ``confirmed`` version (-1 at first and while it is lost), and its next base."""

    def __init__(self, versions: Versions) -> None:
        self.confirmed = -1
        self._versions = versions
        self._base: int | None = None

    @property
    def base(self) -> int | None:
        """Version against which a delta may be sent; ``None`` if everything must be sent."""
        has_base = self._base is not None and self._versions.has(self._base)
        return self._base if has_base else None

    def keep_as_base(self, number: int | None) -> None:
        if number is not None:
            self._versions.want_base(number)
        if self._base is not None:
            self._versions.release_base(self._base)
        self._base = number

    def lose(self) -> None:
        self.confirmed = -1
        self.keep_as_base(None)
