# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks fetch their rollouts themselves (``prompts.single_rank_load = false``).

Rank 0 is told of a batch without its arrays, plans it, and tells each rank which rollouts it
needs. The rollout process holds the arrays until rank 0 asks for the next batch, which it does
when all ranks have trained on this one. What a rank receives does not pass through rank 0.

A secret that is drawn at the start marks every request; others are not answered.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from torchtitan.grpo.rollout import group_frames, link_messages
from torchtitan.grpo.types import RolloutGroup

_POLL_MILLISECONDS = 100


class FetchRequest(msgspec.Struct):
    """A rank asks for rollouts of a batch, by their positions among all of it."""

    version: int
    positions: list[int]


class FetchAnswer(msgspec.Struct):
    """What :func:`group_frames.pack_groups` makes of them, a group each; ``error`` where there are none."""

    groups: list[group_frames.GroupHeader]
    error: str = ""


class FetchFailed(RuntimeError):
    """A rank's rollouts did not come; the message says why."""


class BatchHolder:
    """The rollout process's end.

    Args:
        context: Of its sockets.
        host: Address under which all ranks reach it.
        secret: That marks requests.

    Attributes:
        endpoint: Where it listens.
    """

    def __init__(self, context: zmq.asyncio.Context, host: str, secret: str) -> None:
        self._secret = secret.encode()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._version = -1
        self._held: list[RolloutGroup] = []

    def hold(self, version: int, groups: Sequence[RolloutGroup]) -> None:
        """Keeps a batch, and lets go of the one before: each rollout as a group of its own."""
        self._version = version
        self._held = [
            RolloutGroup(group.group_id, "", (replace(rollout, completion=""),), "")
            for group in groups
            for rollout in group.rollouts
        ]

    async def run(self) -> None:
        """Answers for ever."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or not secrets.compare_digest(frames[1], self._secret):
                continue  # not one of ours
            answer, arrays = self._answer(msgspec.msgpack.decode(frames[2], type=FetchRequest))
            await self._socket.send_multipart([frames[0], link_messages.encode(answer), *arrays])

    def _answer(self, request: FetchRequest) -> tuple[FetchAnswer, list[bytes]]:
        if request.version != self._version:
            return FetchAnswer(
                [],
                f"the batch of version {request.version} is asked for, and that of "
                f"{self._version} is held",
            ), []
        headers, arrays = group_frames.pack_groups([self._held[i] for i in request.positions])
        return FetchAnswer(headers), arrays

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)


class BatchFetcher:
    """A rank's end; used by its training thread alone.

    Args:
        endpoint: Of the :class:`BatchHolder`.
        secret: Its secret.
    """

    def __init__(self, endpoint: str, secret: str) -> None:
        self.endpoint = endpoint
        self._secret = secret.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    def fetch(
        self, version: int, positions: Sequence[int], timeout_seconds: float
    ) -> list[RolloutGroup]:
        """The rollouts at these positions of a batch, each as a group of its own.

        Raises:
            FetchFailed: They did not come in time, or are not there any more.
        """
        request = link_messages.encode(FetchRequest(version, list(positions)))
        self._socket.send_multipart([self._secret, request])
        deadline = time.monotonic() + timeout_seconds
        while not self._socket.poll(_POLL_MILLISECONDS):
            if time.monotonic() > deadline:
                raise FetchFailed(
                    f"The rollout process at {self.endpoint} must hand out {len(positions)} "
                    f"rollouts of batch {version} within {timeout_seconds:g} s, and has not. "
                    "Was it killed? (prompts.single_rank_load = false)"
                )
        header, *arrays = self._socket.recv_multipart()
        answer = msgspec.msgpack.decode(header, type=FetchAnswer)
        if answer.error:
            raise FetchFailed(f"The rollout process at {self.endpoint} refuses: {answer.error}.")
        return group_frames.unpack_groups(answer.groups, arrays)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
        self._context.term()
