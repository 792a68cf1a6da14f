# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets each rank fetch its own rollouts (``prompts.single_rank_load = false``).

Rank 0 receives a batch without its arrays, assigns its rollouts to the ranks, and tells each rank which
ones to fetch. The rollout process holds the arrays until rank 0 asks for the next batch, which it does
once all ranks have trained on this one. Requests without the run's secret are ignored.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.codec import Packed, pack, unpack
from torchtitan.grpo.types import Rollout, RolloutGroup

_POLL_MILLISECONDS = 100
# Far above any request. The connection of a sender of more is closed.
_MAX_REQUEST_BYTES = 16 * 2**20


class FetchRequest(msgspec.Struct):
    """A rank requests rollouts. ``positions`` are their indices in the whole batch."""

    version: int
    positions: list[int]


class FetchAnswer(msgspec.Struct):
    """The header of the packed rollouts, or an ``error``. The arrays follow in the next frame."""

    rollouts: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""


class FetchFailed(RuntimeError):
    """A rank did not receive its rollouts, because of a timeout or a refusal."""


class BatchHolder:
    """Serves the arrays of the current batch to ranks, at the address ``host``, which all can reach."""

    def __init__(self, context: zmq.asyncio.Context, host: str, secret: str) -> None:
        self._secret = secret.encode()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._version = -1
        self._held: list[Rollout] = []

    def hold(self, version: int, groups: Sequence[RolloutGroup]) -> None:
        self._version = version
        self._held = [
            replace(rollout, completion="") for group in groups for rollout in group.rollouts
        ]

    async def run(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or not secrets.compare_digest(frames[1], self._secret):
                continue  # not from a rank of this run
            answer, arrays = self._answer(msgspec.msgpack.decode(frames[2], type=FetchRequest))
            await self._socket.send_multipart([frames[0], link_messages.encode(answer), *arrays])

    def _answer(self, request: FetchRequest) -> tuple[FetchAnswer, list[bytes]]:
        if request.version != self._version:
            return FetchAnswer(
                error=f"it holds the batch of version {self._version}, and the request is for "
                f"version {request.version}"
            ), []
        packed = pack([self._held[i] for i in request.positions])
        return FetchAnswer(packed.header), [packed.arrays]

    def close(self) -> None:
        self._socket.close(linger=0)


class BatchFetcher:
    """Fetches the rollouts of one rank. Only the rank's training thread may use it."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self.endpoint = endpoint
        self._secret = secret.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    def fetch(
        self, version: int, positions: Sequence[int], timeout_seconds: float
    ) -> list[Rollout]:
        request = link_messages.encode(FetchRequest(version, list(positions)))
        self._socket.send_multipart([self._secret, request])
        deadline = time.monotonic() + timeout_seconds
        while not self._socket.poll(_POLL_MILLISECONDS):
            if time.monotonic() > deadline:
                raise FetchFailed(
                    f"The rollout process at {self.endpoint} must deliver {len(positions)} "
                    f"rollouts of the batch of version {version} within {timeout_seconds:g} s, "
                    "but it did not answer. Check whether it was killed, or set "
                    "prompts.single_rank_load = true."
                )
        header, *arrays = self._socket.recv_multipart()
        answer = msgspec.msgpack.decode(header, type=FetchAnswer)
        if answer.error:
            raise FetchFailed(
                f"The rollout process at {self.endpoint} refused to deliver rollouts: "
                f"{answer.error}."
            )
        return unpack(Packed(answer.rollouts, arrays[0]), list[Rollout])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
