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
    """A push that the server has committed, from the first request to the last answer.

    The transfer lasts from the first bucket sent to the last received. During ``pause_seconds`` the
    server generated nothing.
    """

    version: int
    num_bytes: int
    push_seconds: float
    transfer_seconds: float
    pause_seconds: float

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / 1e9 / max(self.transfer_seconds, 1e-9)


class NotPrepared(RuntimeError):
    """The trainer could not prepare a version. No server has received a request."""


class Connection(ABC):
    """Carries versions to one server. After a failure, :meth:`recover` and :meth:`join` must be called."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client

    @abstractmethod
    async def join(self) -> None:
        """Makes the server ready to receive versions. Raises ServerError if that fails."""

    @abstractmethod
    async def prepare(self, version: int) -> None:
        """Prepares a version on the trainer's side only. Raises NotPrepared if that fails."""

    @abstractmethod
    async def push(self, version: int, base: int | None) -> PushReport:
        """Sends one version to the server and makes the server serve it.

        The source ranks hold the version, or are gathering it. Only the changes since ``base`` are
        sent. The server must have confirmed ``base``, and the source ranks must still hold it. With
        ``None``, everything is sent. Raises ServerError if the server refused, failed, or did not
        answer in time, and RuntimeError if the trainer's side failed.
        """

    @abstractmethod
    async def recover(self) -> None:
        """Cancels, on both sides, the work that was under way when a failure occurred.

        It returns within a bounded time, whatever the server does. The connection is then no longer
        joined, and the server generates again if it answers requests.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection and notifies the server, so that it forgets the connection too."""

    async def release_server(self, timeout_seconds: float) -> None:
        """Makes a server that answers leave its groups, drop an open update, and generate again."""
        for step in (self.client.leave_weight_groups, self.client.resume):
            try:
                async with asyncio.timeout(timeout_seconds):
                    await step()
            except (ServerError, TimeoutError) as error:
                # The next join sends both requests again.
                logger.info(
                    "%s could not be told to leave its groups and to resume generation: %s",
                    self.client.url, error,
                )  # fmt: skip


class Sender(ABC):
    """A source rank's part of sending versions.

    The leader calls the methods marked with ``rank_calls.operation``: directly on its own rank, and
    over the ranks' channel on others.
    """

    def __init__(self, rank: int, pool: PayloadPool) -> None:
        self.rank, self.pool = rank, pool

    @abstractmethod
    async def close(self) -> None:
        """Ends the sender's threads. A thread that hangs ends with the process."""


S = TypeVar("S", bound=Sender)


class Transport(ABC, Generic[S]):
    """One way to send versions to servers. Every rank makes it from the same configuration."""

    sender_type: type[S]

    @abstractmethod
    def describe(self) -> str:
        """Says for the log how versions are sent."""

    @abstractmethod
    def make_sender(self, rank: int, pool: PayloadPool) -> S:
        pass

    @abstractmethod
    async def lead(self, senders: Sequence[S]) -> None:
        """Called once on rank 0, before the methods below. ``senders`` ascend by rank."""

    @abstractmethod
    def connect(self, client: InferenceClient) -> Connection:
        pass

    async def forget(self, version: int) -> None:
        """Discards what :meth:`Connection.prepare` made for a version that no lane sends any more."""
