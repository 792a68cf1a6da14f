# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Asks rank 0 for the training devices, for servers that are lent them."""

from collections.abc import Awaitable, Callable

from torchtitan.grpo.rollout.link_messages import DevicesWanted


class DeviceRequests:
    """The rollout process's view of the devices; belongs to one event loop.

    They are free for servers from rank 0's notice until the batch of that version is delivered, before
    which all lent servers must sleep. ``listeners`` are called when the devices become free.
    """

    def __init__(
        self, send: Callable[[DevicesWanted], Awaitable[None]], start_version: int
    ) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._send = send
        self._begun = start_version - 1  # the newest version whose batch was delivered
        self._wanted: int | None = None
        self._free: int | None = None

    @property
    def are_free(self) -> bool:
        return self._free is not None

    async def want(self, version: int) -> None:
        """Asks rank 0, which waits for the batch of ``version``, to free the devices; once each."""
        if version not in (self._wanted, self._free):
            self._wanted = version
            await self._send(DevicesWanted(version))

    def free(self, version: int) -> None:
        """Takes note of rank 0's notice, unless its batch has overtaken it."""
        if version > self._begun:
            self._free = version
            for listener in self.listeners:
                listener()

    def deliver(self, version: int) -> None:
        """Ends the loan. Called just before a batch is sent."""
        self._begun, self._wanted, self._free = version, None, None
