# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets the leader call methods of objects on other ranks, over ZeroMQ.

A method that may be called is marked with :func:`operation` where it is written. From the
marked methods and their annotations :func:`remote` makes an object for the leader, and
:func:`serve` the table of what a rank answers, so no operation is listed twice.

The leader listens on the address under which the other ranks reach it, or on loopback if
all ranks are on one host. Every message carries a secret that the leader drew at the start
and gave to the ranks over the process group; messages without it are ignored. Calls do not
wait for one another. A caller that needs a short timeout applies it itself.
"""

import asyncio
import functools
import inspect
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast, get_type_hints

import msgspec
import zmq
import zmq.asyncio

from torchtitan.grpo.system.groups import leader_address

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "__is_operation__"
# How long a rank that ends waits until the leader knows of it.
_LINGER_MILLISECONDS = 200
# Far above any answer. The connection of a sender of more is closed.
_MAX_BYTES = 64 * 2**20


def operation(method: Method) -> Method:
    """Marks a coroutine method that the leader may call on another rank.

    The arguments must be positional, and their types and that of the result must be ones
    that msgspec encodes.
    """
    setattr(method, _MARK, True)
    return method


def operations_of(interface: type) -> dict[str, Any]:
    """Returns the result type of each operation of a class, by method name."""
    methods = inspect.getmembers(interface, lambda member: hasattr(member, _MARK))
    return {name: get_type_hints(method)["return"] for name, method in methods}


class CallFailed(RuntimeError):
    """A call to another rank failed on that rank. The message is that rank's own."""


class _Call(msgspec.Struct):
    number: int
    method: str
    arguments: list[Any]


class _Answer(msgspec.Struct, tag=True):
    number: int
    result: Any = None
    error: str | None = None
    is_os_error: bool = False


class _Presence(msgspec.Struct, tag=True):
    """Says that a rank now answers calls, or that it no longer does."""

    rank: int
    is_there: bool


class Address(msgspec.Struct, frozen=True):
    """Tells where the leader listens, and the secret that every message must carry."""

    endpoint: str
    secret: bytes


class LeaderChannel:
    """Holds the leader's end of the channel. Constructed on the training thread, used in the publisher's event loop.

    Args:
        timeout_seconds: Maximum duration of one call. It must exceed the timeouts that the
            called methods apply themselves.

    Attributes:
        address: What the other ranks need to connect.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._context = zmq.asyncio.Context()
        # Bound here, so that the port is known before the other ranks are told of it.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        port = self._socket.bind_to_random_port(f"tcp://{leader_address()}")
        self.address = Address(f"tcp://{leader_address()}:{port}", secrets.token_bytes(16))
        self._numbers = itertools.count()
        # By number of the call: the answer to come, its type, and the rank that is to answer.
        self._waiting: dict[int, tuple[asyncio.Future[Any], Any, int]] = {}
        self._is_closed = False
        self._peers: dict[int, bytes] = {}
        self._gone: set[int] = set()
        self._arrived = asyncio.Event()

    async def listen(self) -> None:
        """Receives answers until cancelled."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) != 3 or not secrets.compare_digest(frames[1], self.address.secret):
                    continue  # the sender is not a rank of this run
                peer, _, body = frames
                answer = msgspec.msgpack.decode(body, type=_Answer | _Presence)
                if isinstance(answer, _Answer):
                    self._settle(answer)
                elif answer.is_there:
                    self._peers[answer.rank] = peer
                    self._arrived.set()
                else:
                    self._forget(answer.rank)
        finally:
            self._is_closed = True
            self._arrived.set()
            for future, _, _ in self._waiting.values():
                if not future.done():
                    future.set_exception(CallFailed("The leader no longer listens for answers."))

    def _forget(self, rank: int) -> None:
        """Fails the calls of a rank that has ended, because they will not be answered."""
        self._gone.add(rank)
        self._arrived.set()
        for future, _, asked in self._waiting.values():
            if asked == rank and not future.done():
                future.set_exception(CallFailed(f"Rank {rank} no longer answers calls."))

    def _settle(self, answer: _Answer) -> None:
        future, result_type, _ = self._waiting.pop(answer.number, (None, None, None))
        if future is None or future.done():
            return  # the caller has given up
        if answer.error is not None:
            kind = OSError if answer.is_os_error else CallFailed
            future.set_exception(kind(answer.error))
        else:
            future.set_result(msgspec.convert(answer.result, result_type))

    async def call(self, rank: int, method: str, result_type: Any, *arguments: Any) -> Any:
        """Calls a method on another rank and returns its result.

        Raises:
            CallFailed: If the method raised an exception there, if that rank no longer answers
                calls, or if nobody listens for its answer any more.
            OSError: If the method raised an ``OSError`` there.
            TimeoutError: If the rank did not answer in time.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, result_type, rank
        body = msgspec.msgpack.encode(_Call(number, method, list(arguments)))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while rank not in self._peers and not self._is_closed:
                    self._arrived.clear()
                    await self._arrived.wait()
                if self._is_closed:
                    raise CallFailed(
                        f"Rank {rank} cannot be asked to {method}: the leader no longer listens."
                    )
                if rank in self._gone:
                    raise CallFailed(f"Rank {rank} no longer answers calls.")
                await self._socket.send_multipart([self._peers[rank], self.address.secret, body])
                return await future
        except TimeoutError as error:
            raise TimeoutError(
                f"Rank {rank} must answer the call of {method} within {self._timeout_seconds:g} s, "
                "but no answer has arrived. Check that rank's log."
            ) from error
        finally:
            self._waiting.pop(number, None)
            del future  # otherwise its error and this frame would keep each other alive

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
        self._context.term()


class _Remote:
    def __init__(self, interface: type, channel: LeaderChannel, rank: int) -> None:
        self.rank = rank
        for name, result_type in operations_of(interface).items():
            setattr(self, name, functools.partial(channel.call, rank, name, result_type))


def remote(interface: type[T], channel: LeaderChannel, rank: int) -> T:
    """Returns the leader's form of an object on another rank.

    It has the attribute ``rank`` and the operations of ``interface``, and nothing else.

    Args:
        interface: Class of the object, with methods marked by :func:`operation`.
        channel: The leader's end of the channel.
        rank: Rank in the default process group on which the object lives.
    """
    return cast(T, _Remote(interface, channel, rank))


class Served(Protocol):
    """An object whose operations a rank offers to the leader."""

    async def close(self) -> None:
        """Ends what the object has started."""
        ...


async def serve(served: Sequence[Served], rank: int, address: Address) -> None:
    """Answers the leader's calls until cancelled; each call runs as a task of its own.

    The objects are closed at the end.

    Args:
        served: The objects whose operations are offered. Their names must not collide.
        rank: Rank of the current process in the default process group.
        address: Where the leader listens.
    """
    methods = {name: getattr(one, name) for one in served for name in operations_of(type(one))}
    context = zmq.asyncio.Context()
    channel = context.socket(zmq.DEALER)
    channel.set_hwm(0)
    channel.connect(address.endpoint)

    async def announce(is_there: bool) -> None:
        body = msgspec.msgpack.encode(_Presence(rank, is_there))
        await channel.send_multipart([address.secret, body])

    async def answer(call: _Call) -> None:
        try:
            result = await methods[call.method](*call.arguments)
            reply = _Answer(call.number, result)
        except Exception as error:  # the process boundary: the leader raises it
            text = f"rank {rank}: {type(error).__name__}: {error}"
            reply = _Answer(call.number, error=text, is_os_error=isinstance(error, OSError))
        await channel.send_multipart([address.secret, msgspec.msgpack.encode(reply)])

    try:
        await announce(True)
        async with asyncio.TaskGroup() as calls:
            while True:
                secret, body = await channel.recv_multipart()
                call = msgspec.msgpack.decode(body, type=_Call)
                if secrets.compare_digest(secret, address.secret) and call.method in methods:
                    calls.create_task(answer(call), name=call.method)
    finally:
        # The leader, which may end at the same time, need not wait for answers.
        await announce(False)
        channel.close(linger=_LINGER_MILLISECONDS)
        context.term()
        for one in served:
            await one.close()
