# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines what a transport must provide. Lanes, leader and agents rely on nothing else.

A transport has three parts:

    Transport     on every rank; made from the configuration
    Sender        on each source rank; does there what the leader asks for
    Connection    on rank 0, one for each server; pushes versions to it

All methods but the constructors belong to the event loop of the publisher's thread. What
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
        selection: Name of the parameters that were pushed; see ``ParameterSelection``.
        num_bytes: Sum of the payloads.
        push_seconds: Time from the first request to the last answer.
        transfer_seconds: Part of it from the first bucket sent to the last one received.
        pause_seconds: Part of it during which the server generated nothing.
    """

    version: int
    selection: str
    num_bytes: int
    push_seconds: float
    transfer_seconds: float
    pause_seconds: float


class NotPrepared(RuntimeError):
    """The trainer could not prepare a version. No server has been asked for anything."""


class Connection(ABC):
    """Carries versions to one server. A connection is either joined or not.

    After any failure :meth:`recover` takes down what the connection has built up, and the
    server must be joined again before the next push.

    Args:
        client: The server. The caller closes it.
    """

    def __init__(self, client: InferenceClient) -> None:
        self.client = client

    @abstractmethod
    async def join(self) -> None:
        """Gets ready to push.

        Raises:
            ServerError: If the server cannot join, or does not do so in time.
        """

    @abstractmethod
    async def prepare(self, version: int) -> None:
        """Prepares, on the trainer's side alone, what every server will be sent.

        Raises:
            NotPrepared: If that failed. The server is unchanged.
        """

    @abstractmethod
    async def push(self, version: int, base: int | None) -> PushReport:
        """Sends one version to the server and makes the server serve it.

        Args:
            version: Policy version that the source ranks hold or are gathering.
            base: Version that the server has confirmed and the source ranks still hold.
                Only what changed since then is sent. ``None`` sends everything.

        Raises:
            ServerError: If the server refused, failed, or did not answer in time.
            RuntimeError: If the trainer's side failed.
        """

    @abstractmethod
    async def recover(self) -> None:
        """Gives up, on both sides, what was under way when something failed.

        The method returns within a bounded time, whatever the server does. Afterwards the
        connection is no longer joined, and a server that answers generates again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection. The server is told, so that it forgets the connection as well."""

    async def release_server(self, timeout_seconds: float) -> None:
        """Makes the server drop groups and open updates, and generate again, if it answers.

        A predecessor that was killed may have left such things behind, too.
        """
        for step in (self.client.leave_weight_groups, self.client.resume):
            try:
                async with asyncio.timeout(timeout_seconds):
                    await step()
            except (ServerError, TimeoutError) as error:
                # The next join makes both requests again.
                logger.info("%s could not be told that it is left: %s", self.client.url, error)


class Sender(ABC):
    """Does a source rank's part of sending versions.

    The leader calls the methods that subclasses mark with ``rank_channel.operation``, on its own
    rank directly and on others over the channel.

    Args:
        rank: Rank of the current process in the default process group.
        pool: The versions that this rank holds.
    """

    def __init__(self, rank: int, pool: PayloadPool) -> None:
        self.rank, self.pool = rank, pool

    @abstractmethod
    async def close(self) -> None:
        """Ends what was started. A thread that hangs is left to the process's end."""


S = TypeVar("S", bound=Sender)


class Transport(ABC, Generic[S]):
    """Defines one way in which versions travel to servers.

    Every rank constructs it, from the same configuration.

    Attributes:
        sender_type: Class of the senders.
    """

    sender_type: type[S]

    @abstractmethod
    def describe(self) -> str:
        """Returns how versions travel, for the log."""

    @abstractmethod
    def make_sender(self, rank: int, pool: PayloadPool) -> S:
        """Makes the sender of this rank, which is a source."""

    @abstractmethod
    def lead(self, senders: Sequence[S]) -> None:
        """Gets ready on rank 0; called once, before the methods below.

        Args:
            senders: Those of all source ranks, ascending by rank. Versions are sent in this
                order.
        """

    @abstractmethod
    def connect(self, client: InferenceClient) -> Connection:
        """Makes the connection to one server, which is not joined yet."""

    async def forget(self, version: int) -> None:
        """Discards what :meth:`Connection.prepare` made of a version that no lane sends."""

    def close(self) -> None:
        """Ends what :meth:`lead` started. It is idempotent."""
