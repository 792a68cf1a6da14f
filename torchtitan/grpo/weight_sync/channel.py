# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How the leader calls the agents of other ranks: ZeroMQ, one question, one answer each.

The leader listens on the address under which the other ranks reach it, or on loopback
where all ranks are on one host. A secret that was drawn at the start and handed to the
ranks over the process group marks every message, so nobody else is listened to. Calls do
not wait for one another; the bound of each is its caller's business.
"""

import asyncio
import itertools
import secrets
from typing import Any

import msgspec
import torch.distributed as dist
import zmq
import zmq.asyncio

from torchtitan.grpo.system.groups import leader_address
from torchtitan.grpo.weight_sync.agent import Agent, LocalAgent
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

_RESULTS: dict[str, Any] = {
    "wait_copied": None,
    "gather": None,
    "drop": None,
    "prepare": BucketSpec,
    "open": WeightGroupInfo,
    "join": None,
    "send": None,
    "leave": None,
    "write": None,
}
"""What may be called, and what it returns."""


class AgentFailed(RuntimeError):
    """A call to another rank's agent failed there; the message is that rank's."""


class _Call(msgspec.Struct):
    number: int
    method: str
    arguments: list[Any]


class _Answer(msgspec.Struct):
    number: int
    result: Any = None
    error: str | None = None
    is_os_error: bool = False


class Address(msgspec.Struct, frozen=True):
    """Where the leader listens, and the secret that opens it."""

    endpoint: str
    secret: bytes


class LeaderChannel:
    """The leader's end. Made on the training thread, used in the publisher's event loop.

    Args:
        timeout_seconds: Bound of one call: more than any may take by its own bounds.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._context = zmq.asyncio.Context()
        # Bound at once, so that its port can be told to the others.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        port = self._socket.bind_to_random_port(f"tcp://{leader_address()}")
        self.address = Address(f"tcp://{leader_address()}:{port}", secrets.token_bytes(16))
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._is_closed = False
        self._peers: dict[int, bytes] = {}
        self._arrived = asyncio.Event()

    async def listen(self) -> None:
        """Takes in answers until cancelled."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) != 3 or not secrets.compare_digest(frames[1], self.address.secret):
                    continue  # not one of ours
                peer, _, body = frames
                answer = msgspec.msgpack.decode(body, type=_Answer | int)
                if isinstance(answer, int):  # a rank says that it is there
                    self._peers[answer] = peer
                    self._arrived.set()
                else:
                    self._settle(answer)
        finally:
            self._is_closed = True
            self._arrived.set()
            for future, _ in self._waiting.values():
                if not future.done():
                    future.set_exception(AgentFailed("Nobody listens for the answer any more."))

    def _settle(self, answer: _Answer) -> None:
        future, result_type = self._waiting.pop(answer.number, (None, None))
        if future is None or future.done():
            return  # given up
        if answer.error is not None:
            kind = OSError if answer.is_os_error else AgentFailed
            future.set_exception(kind(answer.error))
        else:
            future.set_result(msgspec.convert(answer.result, result_type))

    async def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a method of a rank's agent.

        Raises:
            AgentFailed: It failed there, or nobody hears its answer.
            OSError: It failed there with one.
            TimeoutError: It did not answer in time.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, _RESULTS[method]
        body = msgspec.msgpack.encode(_Call(number, method, list(arguments)))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while rank not in self._peers and not self._is_closed:
                    self._arrived.clear()
                    await self._arrived.wait()
                if self._is_closed:
                    raise AgentFailed(f"Rank {rank} cannot be asked to {method}: nobody listens.")
                await self._socket.send_multipart([self._peers[rank], self.address.secret, body])
                return await future
        except TimeoutError as error:
            raise TimeoutError(
                f"Rank {rank} must {method} within {self._timeout_seconds:g} s; it did not answer."
            ) from error
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
        self._context.term()


class RemoteAgent:
    """The agent of another rank; see :class:`Agent` for the methods.

    Args:
        channel: To all ranks.
        rank: That rank.
        num_buckets: What it sends of each version.
    """

    def __init__(self, channel: LeaderChannel, rank: int, num_buckets: int) -> None:
        self._channel, self.rank, self.num_buckets = channel, rank, num_buckets

    async def wait_copied(self, slot: int, version: int) -> None:
        await self._channel.call(self.rank, "wait_copied", slot, version)

    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        await self._channel.call(self.rank, "gather", slot, version, is_held)

    async def drop(self, version: int) -> None:
        await self._channel.call(self.rank, "drop", version)

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        return await self._channel.call(self.rank, "prepare", version, index, base)

    async def open(self, server_url: str, world_size: int) -> WeightGroupInfo:
        return await self._channel.call(self.rank, "open", server_url, world_size)

    async def join(self, server_url: str) -> None:
        await self._channel.call(self.rank, "join", server_url)

    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        await self._channel.call(self.rank, "send", server_url, version, index, base)

    async def leave(self, server_url: str) -> None:
        await self._channel.call(self.rank, "leave", server_url)

    async def write(self, version: int, directory: str) -> None:
        await self._channel.call(self.rank, "write", version, directory)


async def serve_agent(agent: LocalAgent, address: Address) -> None:
    """Answers the leader's calls until cancelled; each call is a task of its own.

    The agent is closed at the end.
    """
    context = zmq.asyncio.Context()
    channel = context.socket(zmq.DEALER)
    channel.set_hwm(0)
    channel.connect(address.endpoint)

    async def answer(call: _Call) -> None:
        try:
            result = await getattr(agent, call.method)(*call.arguments)
            reply = _Answer(call.number, result)
        except Exception as error:  # the process's boundary: the leader raises it
            text = f"rank {agent.rank}: {type(error).__name__}: {error}"
            reply = _Answer(call.number, error=text, is_os_error=isinstance(error, OSError))
        await channel.send_multipart([address.secret, msgspec.msgpack.encode(reply)])

    try:
        await channel.send_multipart([address.secret, msgspec.msgpack.encode(agent.rank)])
        async with asyncio.TaskGroup() as calls:
            while True:
                secret, body = await channel.recv_multipart()
                call = msgspec.msgpack.decode(body, type=_Call)
                if secrets.compare_digest(secret, address.secret) and call.method in _RESULTS:
                    calls.create_task(answer(call), name=call.method)
    finally:
        channel.close(linger=0)
        context.term()
        await agent.close()


def agents_of_all_ranks(
    own: LocalAgent, channel: LeaderChannel, num_buckets: dict[int, int]
) -> list[Agent]:
    """On the leader: one agent a rank, in the order of ranks."""
    others = range(1, dist.get_world_size())
    return [own, *(RemoteAgent(channel, rank, num_buckets.get(rank, 0)) for rank in others)]
