# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Asks rank 0 for the training devices, for servers that are lent them."""

import asyncio
from collections.abc import Awaitable, Callable

from torchtitan.grpo.rollout.link_messages import DevicesWanted
from torchtitan.grpo.types import BatchPart


class DeviceRequests:
    """The rollout process's view of the devices; belongs to one event loop.

    They are free for servers from rank 0's notice until the first part of the batch of that version
    is delivered, before which all lent servers must sleep. They stay with the trainer until the last
    part is delivered, because the gradient of the batch is incomplete in between.
    """

    def __init__(
        self, send: Callable[[DevicesWanted], Awaitable[None]], start_version: int
    ) -> None:
        self._send = send
        self._begun = start_version - 1  # the newest version of which a part was delivered
        self._is_within_batch = False
        self._wanted: int | None = None
        self._free: int | None = None
        self._changed = asyncio.Event()

    @property
    def are_free(self) -> bool:
        return self._free is not None

    async def want(self, version: int) -> None:
        """Asks rank 0, which waits for the batch of ``version``, to free the devices; once each."""
        assert not self._is_within_batch, (
            f"the devices are wanted for version {version} in the middle of a batch, whose "
            "gradient is incomplete"
        )
        if version not in (self._wanted, self._free):
            self._wanted = version
            await self._send(DevicesWanted(version))

    async def until_free(self, version: int, timeout_seconds: float) -> bool:
        """Waits for the devices. Returns False if the batch of ``version`` is delivered instead.

        Raises TimeoutError if rank 0 does not free them in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._free != version and self._begun < version:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                "Rank 0 must free the training devices for lent servers within "
                f"{timeout_seconds:g} s while it waits for the batch of version {version}, but it has "
                "not answered. Check whether a training rank hangs."
            ) from None
        return self._free == version

    def free(self, version: int) -> None:
        """Takes note of rank 0's notice, unless its batch has overtaken it."""
        if version > self._begun:
            self._free = version
            self._changed.set()

    def deliver(self, version: int, part: BatchPart) -> None:
        """Ends the loan. Called just before a part of a batch is sent."""
        self._begun, self._is_within_batch = version, not part.ends_batch
        self._wanted = self._free = None
        self._changed.set()
