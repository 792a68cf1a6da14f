# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the backend of the process groups with one server whenever the server joins.

A server may return with another version of NCCL or on another GPU, so the choice is made again each
time. All source ranks use the same backend.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.weight_wire.group_facts import (
    BackendChoice,
    GroupFacts,
    GroupTransportName,
    choose_backend,
)

logger = logging.getLogger(__name__)


class NcclImpossible(ServerError):
    """Raised if ``weight_sync.transport`` requires NCCL and the server cannot be reached over NCCL."""


class FactSource(Protocol):
    """The interface of a source rank's sender that :class:`Handshake` needs."""

    async def group_facts(self) -> GroupFacts:
        """Returns the facts about the source rank's process."""
        ...


class Handshake:
    """Chooses a backend each time the server joins, and logs the choice whenever it changes.

    Args:
        client: The server.
        transport: ``weight_sync.transport``.
    """

    def __init__(self, client: InferenceClient, transport: GroupTransportName) -> None:
        self._client = client
        self._transport: GroupTransportName = transport
        self._last: BackendChoice | None = None

    async def backend(self, senders: Sequence[FactSource]) -> str:
        """Returns ``nccl`` or ``gloo``.

        Raises:
            NcclImpossible: If ``weight_sync.transport = "nccl"`` and NCCL cannot work.
        """
        if self._transport == "host":
            return "gloo"
        ours = await asyncio.gather(*(sender.group_facts() for sender in senders))
        choice = choose_backend(self._transport, ours, await self._client.group_facts())
        if choice.backend is None:
            raise NcclImpossible(
                f"{self._client.url} cannot receive weights over NCCL, which weight_sync.transport = "
                f"'nccl' requires: {' '.join(choice.obstacles)} Alternatively, set "
                "weight_sync.transport = 'auto' or 'host'."
            )
        if choice != self._last:
            self._last = choice
            self._tell(choice)
        return choice.backend

    def _tell(self, choice: BackendChoice) -> None:
        url = self._client.url
        if choice.obstacles:
            logger.warning(
                "%s receives weights from host memory over gloo, because NCCL cannot be used: %s "
                "Alternatively, set weight_sync.transport = 'host', which does not need NCCL.",
                url,
                " ".join(choice.obstacles),
            )
        elif choice.doubts and choice.backend == "gloo":
            logger.warning(
                "%s receives weights from host memory over gloo, because it is not known whether "
                "NCCL can be used: %s Set weight_sync.transport = 'nccl' to use it nevertheless, "
                "or 'host' to keep host memory without this warning.",
                url,
                " ".join(choice.doubts),
            )
        elif choice.doubts:
            logger.warning(
                "%s receives weights over NCCL, as weight_sync.transport = 'nccl' requires, but it "
                "is not known whether NCCL can be used: %s If the first push fails, set "
                "weight_sync.transport = 'host'.",
                url,
                " ".join(choice.doubts),
            )
        else:
            over = "NCCL" if choice.backend == "nccl" else "gloo, from host memory"
            logger.info("%s receives weights over %s.", url, over)
