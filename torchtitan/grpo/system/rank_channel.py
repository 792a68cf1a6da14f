# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Connects every rank with rank 0, on a background thread of each rank, and offers two services.

- Every rank soon learns that another one has died, and in which phase, before a collective with it
  fails. Each rank sends its status once a second, and whenever it changes. A connection that closes
  without a farewell means a dead process. A silent one means a frozen process or a lost host. Rank 0
  tells the others which rank was lost, and they see the loss of rank 0 by themselves.
- Rank 0 calls methods of objects on other ranks (`rank_calls.py`), even several at the same time. Calls
  to a lost rank fail at once.

Rank 0 listens where the others reach it, or on loopback if all are on one host. A connection's first
message must carry a secret, which rank 0 gives out over the process group.
"""

import asyncio
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch.distributed as dist

from torchtitan.grpo.system.groups import leader_address
from torchtitan.grpo.system.rank_calls import Answer, Call, RankCallFailed, Served, operations_of
from torchtitan.grpo.system.rank_status import LostRank, Status, StatusBoard
from torchtitan.grpo.system.waits import wait_at_most

_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_LINGER_SECONDS = 2.0
_STRANGER_SECONDS = 10.0
_MAX_STRANGERS = 64
_MAX_HELLO_BYTES = 65536
# Far above any answer.
_MAX_BYTES = 64 * 2**20


class RankLost(RuntimeError):
    """This rank cannot go on because another one is lost. The loss has been reported already."""


class Message(msgspec.Struct, omit_defaults=True):
    """A message between ranks.

    Only a connection's first message has a ``secret``. ``lost`` is a rank that rank 0 has lost. After a
    ``farewell``, the end of the connection is no loss, unless the sender says that it has ``failed``.
    """

    status: Status | None = None
    secret: bytes = b""
    farewell: bool = False
    failed: bool = False
    lost: LostRank | None = None
    call: Call | None = None
    answer: Answer | None = None


class _Peer:
    """The other end of a connection. Its ``status`` is None until the secret has arrived from there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status: Status | None = None
        self._heard_at = time.monotonic()
        self._has_left = self._has_failed = False

    def send(self, message: Message) -> None:
        """Sends without waiting for the peer to read. A peer that stops reading also stops sending, and so is noticed."""
        if not self._writer.is_closing():
            body = msgspec.msgpack.encode(message)
            self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self, max_bytes: int = _MAX_BYTES) -> Message:
        """Returns the next message. If the connection is unusable, may raise any exception."""
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        if size > max_bytes:
            raise ValueError(f"A message must have at most {max_bytes} bytes, got {size}.")
        message = msgspec.msgpack.decode(await self._reader.readexactly(size), type=Message)
        self._heard_at = time.monotonic()
        self._has_left |= message.farewell
        self._has_failed |= message.failed
        return message

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard_at

    def loss(self, silent_seconds: float = 0.0) -> LostRank | None:
        """Returns this peer as a lost rank, or None if it never showed the secret or has ended normally."""
        if self.status is None or (self._has_left and not self._has_failed):
            return None
        return LostRank(self.status, silent_seconds, self._has_failed)

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with suppress(OSError):
            await self._writer.wait_closed()


class RankChannel:
    """This rank's end of the channel. A rank counts as lost after ``silence_seconds`` without a message.

    ``lost`` is the first lost rank. ``on_lost`` is called once, with that rank, on the channel's thread.
    """

    def __init__(self, silence_seconds: float, on_lost: Callable[[LostRank], None]) -> None:
        self._silence_seconds, self._on_lost = silence_seconds, on_lost
        self.lost: LostRank | None = None
        self._lost_event = threading.Event()  # set when the loss has been reported
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = self._has_failed = False
        self.board = StatusBoard(lambda: self._post(self._tell_status))
        self._rank, self._is_leader = 0, False
        self._secret = b""
        self._all_here = threading.Event()
        self._num_others = 0
        # Everything below belongs to the channel's event loop.
        self._closing = asyncio.Event()
        self._peers: list[_Peer] = []
        self._strangers: list[_Peer] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[Answer], int]] = {}  # with the rank asked
        self._open_calls: dict[int, Call] = {}
        self._deliver: Callable[[Call], None] | None = None

    def start(self) -> None:
        """Connects the ranks. Collective over all ranks of the default process group."""
        self._rank, self._num_others = dist.get_rank(), dist.get_world_size() - 1
        if self._num_others == 0:
            return
        self._is_leader = self._rank == 0
        where: list[tuple[str, int, bytes] | None] = [None]
        if self._is_leader:
            connection = socket.create_server((leader_address(), 0))
            host, port = connection.getsockname()[:2]
            where[0] = host, port, secrets.token_bytes(16)
        dist.broadcast_object_list(where, src=0)
        assert where[0] is not None
        host, port, self._secret = where[0]
        if not self._is_leader:
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, connection), name="rank-channel", daemon=True
        )
        self._thread.start()
        if self._is_leader and not self._all_here.wait(_CONNECT_SECONDS):
            raise TimeoutError(
                f"All {self._num_others} other ranks must connect to rank 0 at {host}:{port} within "
                f"{_CONNECT_SECONDS:g} s, but {len(self._peers)} have. Look for an error in their "
                "output."
            )

    @property
    def _backlog(self) -> int:
        """How many connections may wait: all ranks, which connect at once, and some strangers."""
        return self._num_others + _MAX_STRANGERS

    def raise_if_lost(self) -> None:
        if self.lost is not None:
            raise RankLost(f"Training rank {self.lost.status.rank} is lost.")

    def wait_lost(self, timeout_seconds: float) -> bool:
        """Waits for ``on_lost`` to return, so that the process may end. Returns whether it did in time."""
        return self._thread is not None and self._lost_event.wait(timeout_seconds)

    def close(self, *, failed: bool = False) -> None:
        """Says farewell and ends the thread. With ``failed``, the other ranks count this one as lost."""
        if not self._is_closing:
            self._is_closing, self._has_failed = True, failed
            self._post(self._closing.set)
            if self._thread is not None:
                self._thread.join(_CLOSE_SECONDS)
            self.board.close()

    # -- calls, from the event loop of any thread ------------------------------------------

    async def call(
        self, rank: int, method: str, result_type: Any, timeout_seconds: float, *arguments: Any
    ) -> Any:
        """Calls a method on another rank from rank 0.

        Raises TimeoutError, OSError if the method raised an OSError, or RankCallFailed if the method raised
        another error or the rank no longer answers.
        """
        assert self._loop is not None, "the channel must be started before a call"
        asking = self._ask(rank, method, timeout_seconds, list(arguments))
        # Not kept in a variable: an error and this frame would keep each other alive.
        answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        if answer.error is not None:
            raise (OSError if answer.is_os_error else RankCallFailed)(answer.error)
        return msgspec.msgpack.decode(answer.result, type=result_type)

    async def serve(self, served: Sequence[Served]) -> None:
        """Answers rank 0's calls, in tasks of the running event loop, until cancelled.

        Calls that came earlier are answered as well. The objects ``served`` must have operations of
        different names. At the end, unanswered calls are refused and the objects are closed.
        """
        methods = {name: getattr(one, name) for one in served for name in operations_of(type(one))}
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Call]()

        def deliver(call: Call) -> None:
            with suppress(RuntimeError):  # the loop has ended, so that the call is refused soon
                loop.call_soon_threadsafe(inbox.put_nowait, call)

        async def answer(call: Call) -> None:
            try:
                result = await methods[call.method](*call.arguments)
                reply = Answer(call.number, msgspec.msgpack.encode(result))
            except Exception as error:  # the process boundary: rank 0 raises it
                text = f"rank {self._rank}: {type(error).__name__}: {error}"
                reply = Answer(call.number, error=text, is_os_error=isinstance(error, OSError))
            self._post(self._answer, reply)

        self._post(self._begin_serving, deliver)
        try:
            async with asyncio.TaskGroup() as calls:
                while True:
                    call = await inbox.get()
                    calls.create_task(answer(call), name=call.method)
        finally:
            self._post(self._end_serving)
            for one in served:
                await one.close()

    def _post(self, call: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, *arguments)

    # -- the channel's thread --------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._watch(connection))

    async def _watch(self, connection: socket.socket) -> None:
        if self._is_leader:
            hearing = await asyncio.start_server(
                self._admit, sock=connection, backlog=self._backlog
            )
        else:
            leader = _Peer(*await asyncio.open_connection(sock=connection))
            leader.status = Status(0, connection.getpeername()[0], 0)  # until it has sent its own
            leader.send(Message(self.board.current, self._secret))
            hearing = asyncio.create_task(self._hear(leader))
        while not self._closing.is_set():
            begin = time.monotonic()
            await wait_at_most(_BEAT_SECONDS, self._closing)
            self._tell_status()
            # If this thread itself was held up, what has arrived meanwhile is heard first.
            if time.monotonic() - begin < 2 * _BEAT_SECONDS:
                for peer in self._peers:
                    if (seconds := peer.silent_seconds) > self._silence_seconds:
                        self._report(peer.loss(seconds))
        if isinstance(hearing, asyncio.Server):
            hearing.close()
        self._tell(Message(self.board.current, farewell=True, failed=self._has_failed))
        peers = [*self._peers, *self._strangers]
        for peer in peers:
            peer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await asyncio.gather(*(peer.wait_closed() for peer in peers))

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection on rank 0, which is a stranger's until the secret has arrived.

        Strangers are sent nothing, and their end is no loss. A stranger's connection is closed if the
        secret does not come in time, or if there are too many and it is the oldest.
        """
        stranger = _Peer(reader, writer)
        self._strangers.append(stranger)
        if len(self._strangers) > self._backlog:
            self._strangers.pop(0).close()
        status: Status | None = None
        with suppress(Exception):  # whatever a stranger may send
            async with asyncio.timeout(_STRANGER_SECONDS):
                hello = await stranger.receive(_MAX_HELLO_BYTES)
            if secrets.compare_digest(hello.secret, self._secret):
                status = hello.status
        if stranger in self._strangers:
            self._strangers.remove(stranger)
        if status is None or self._is_closing:
            stranger.close()
            return
        stranger.status = status
        stranger.send(Message(self.board.current))
        await self._hear(stranger)

    async def _hear(self, peer: _Peer) -> None:
        self._peers.append(peer)
        if len(self._peers) == self._num_others:
            self._all_here.set()
        try:
            while True:
                self._take(peer, await peer.receive())
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            self._peers.remove(peer)
            peer.close()
        self._report(peer.loss())
        for number, (future, rank) in self._waiting.items():
            if peer.status is not None and rank == peer.status.rank:
                _settle(future, _no_answer(number, rank))

    def _take(self, peer: _Peer, message: Message) -> None:
        peer.status = message.status or peer.status
        self._report(message.lost)
        if message.answer is not None and message.answer.number in self._waiting:
            _settle(self._waiting[message.answer.number][0], message.answer)
        if message.call is not None:
            self._open_calls[message.call.number] = message.call
            if self._deliver is not None:
                self._deliver(message.call)

    def _report(self, lost: LostRank | None) -> None:
        if lost is not None and self.lost is None and not self._is_closing:
            self.lost = lost
            if self._is_leader:
                self._tell(Message(lost=lost))
            self._on_lost(lost)
            self._lost_event.set()

    def _tell_status(self) -> None:
        self._tell(Message(self.board.current))

    def _tell(self, message: Message) -> None:
        for peer in self._peers:
            peer.send(message)

    # -- calls, in the channel's event loop --------------------------------------------------

    async def _ask(
        self, rank: int, method: str, timeout_seconds: float, arguments: list[Any]
    ) -> Answer:
        number = next(self._numbers)
        peer = next((p for p in self._peers if p.status and p.status.rank == rank), None)
        if peer is None:
            return _no_answer(number, rank)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, rank
        try:
            peer.send(Message(call=Call(number, method, arguments)))
            async with asyncio.timeout(timeout_seconds):
                return await future
        except TimeoutError as error:
            raise TimeoutError(
                f"Rank {rank} must answer the call of {method} within {timeout_seconds:g} s, "
                "but no answer has arrived. Check that rank's log."
            ) from error
        finally:
            del self._waiting[number]

    def _begin_serving(self, deliver: Callable[[Call], None]) -> None:
        self._deliver = deliver
        for call in self._open_calls.values():
            deliver(call)

    def _end_serving(self) -> None:
        self._deliver = None
        for number in list(self._open_calls):
            self._answer(_no_answer(number, self._rank))

    def _answer(self, answer: Answer) -> None:
        if self._open_calls.pop(answer.number, None) is not None:
            self._tell(Message(answer=answer))


def _settle(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():  # otherwise the caller has given up
        future.set_result(answer)


def _no_answer(number: int, rank: int) -> Answer:
    return Answer(number, error=f"Rank {rank} no longer answers calls.")
