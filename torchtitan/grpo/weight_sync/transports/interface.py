# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines the interface of a transport. Lanes, the leader and agents rely on nothing else.

A transport has three parts:

    Transport     exists on every rank and is made from the configuration
    Sender        exists on each source rank and does what the leader asks for
    Connection    exists on rank 0, once for each server, and pushes versions to the server

All methods except the constructors run in the event loop of the publisher's thread. Work that
blocks must run on another thread.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.weight_sync.payloads import PayloadPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushReport:
    """A push that the server has committed.

    Attributes:
        version: Policy version that the server now serves.
        num_bytes: Number of bytes of all payloads together.
        push_seconds: Time from the first request to the last answer.
        transfer_seconds: Time within the push from the first bucket sent to the last one received.
        pause_seconds: Time within the push during which the server generated nothing.
    """

    version: int
    num_bytes: int
    push_seconds: float
    transfer_seconds: float
    pause_seconds: float


class NotPrepared(RuntimeError):
    """The trainer could not prepare a version. No server has received a request."""


class Connection(ABC):
    """Carries versions to one server. A connection is either joined or not joined.

    After any failure, :meth:`recover` takes the connection down, and the connection must be joined
    again before the next push.

    Args:
        client: The server. The caller closes it.
    """

    def __init__(self, client: InferenceClient) -> None:
        self.client = client

    @abstractmethod
    async def join(self) -> None:
        """Joins the connection, so that versions can be pushed; ServerError if that fails or takes too long."""

    @abstractmethod
    async def prepare(self, version: int) -> None:
        """Prepares a version on the trainer's side only.

        Raises:
            NotPrepared: If the version could not be prepared. The server is unchanged.
        """

    @abstractmethod
    async def push(self, version: int, base: int | None) -> PushReport:
        """Sends one version to the server and makes the server serve it.

        Args:
            version: Policy version that the source ranks hold or are gathering.
            base: Version that the server has confirmed and that the source ranks still hold. Only
                the changes since this version are sent. ``None`` sends everything.

        Raises:
            ServerError: If the server refused, failed, or did not answer in time.
            RuntimeError: If the trainer's side failed.
        """

    @abstractmethod
    async def recover(self) -> None:
        """Cancels, on both sides, the work that was under way when a failure occurred.

        The method returns within a bounded time, whatever the server does. Afterwards, the
        connection is no longer joined, and the server generates again if it answers requests.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection and notifies the server, so that it forgets the connection too."""

    async def release_server(self, timeout_seconds: float) -> None:
        """Makes the server leave its groups, drop an open update, and generate again.

        A trainer that was killed earlier may have left such groups and updates behind. If the server
        does not answer, the method logs this and returns.
        """
        for step in (self.client.leave_weight_groups, self.client.resume):
            try:
                async with asyncio.timeout(timeout_seconds):
                    await step()
            except (ServerError, TimeoutError) as error:
                # The next join sends both requests again.
                logger.info(
                    "%s could not be told to leave its groups and to resume generation: %s",
                    self.client.url,
                    error,
                )


class Sender(ABC):
    """A source rank's part of sending versions.

    The leader calls the methods that subclasses mark with ``rank_calls.operation``: directly on its own
    rank, and over the ranks' channel on other ranks.

    Args:
        rank: Rank of the current process in the default process group.
        pool: The versions that this rank holds.
    """

    def __init__(self, rank: int, pool: PayloadPool) -> None:
        self.rank, self.pool = rank, pool

    @abstractmethod
    async def close(self) -> None:
        """Ends the sender's threads. A thread that hangs ends with the process."""


S = TypeVar("S", bound=Sender)


class Transport(ABC, Generic[S]):
    """One way to send versions to servers. Every rank makes it from the same configuration.

    Attributes:
        sender_type: Class of the senders.
    """

    sender_type: type[S]

    @abstractmethod
    def describe(self) -> str:
        """Returns a description, for the log, of how versions are sent."""

    @abstractmethod
    def make_sender(self, rank: int, pool: PayloadPool) -> S:
        pass

    @abstractmethod
    async def lead(self, senders: Sequence[S]) -> None:
        """Prepares the transport on rank 0; called once, before the methods below.

        Args:
            senders: The senders of all source ranks, ascending by rank. Versions are sent in this
                order.
        """

    @abstractmethod
    def connect(self, client: InferenceClient) -> Connection:
        pass

    async def forget(self, version: int) -> None:
        """Discards what :meth:`Connection.prepare` made for a version that no lane sends any more."""

    def close(self) -> None:
        """Ends what :meth:`lead` started. This method is idempotent."""
