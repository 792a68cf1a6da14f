# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The trainer's end of one server's weight group, and the push over it.

    consumes        buckets, from whoever gathered them
    produces        a committed policy version on one server
    waits for       this server alone, each time with a bound
    unblocked by    the server's answer, its death, or the group's timeout

A connection is joined or it is not. Whatever fails takes the group down, since a
collective that one side has given up cannot be completed: join again, then push again.
"""

import asyncio
import functools
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.grpo.inference.client import (
    BucketSpec,
    InferenceClient,
    ServerError,
    WeightGroupInfo,
)
from torchtitan.grpo.weight_sync.process_group import create_weight_group, destroy_weight_group

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a failed push waits for its broadcast to notice that the server has left.
_BROADCAST_GRACE_SECONDS = 2.0
# NCCL's watchdog ends the whole process at a group's timeout. It must not come before the
# requests that end a failed push in order, each of which has a bound of its own.
_NCCL_PATIENCE = 5


@dataclass(frozen=True)
class Bucket:
    """Some tensors, as they travel.

    Attributes:
        spec: What they are.
        payload: [num_bytes] uint8, contiguous, the tensors' bytes in order.
    """

    spec: BucketSpec
    payload: torch.Tensor


@dataclass(frozen=True)
class PushReport:
    """A push that was committed.

    Attributes:
        version: Policy version that the server now serves.
        num_bytes: Sum of the payloads.
        push_seconds: From the first bucket's request to the server's resuming.
        pause_seconds: How long of that the server wrote nothing.
    """

    version: int
    num_bytes: int
    push_seconds: float
    pause_seconds: float


class ServerConnection:
    """The trainer's end of one server's weight group.

    Collectives, and the iterator of the buckets, run on one thread of the connection's
    own, the control requests on the caller's event loop. One push at a time.

    Args:
        client: The server; it stays the caller's to close.
        master_address: This host's address as the server sees it; the store listens
            there, on a free port.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: Bound of a join, and of each bucket.
        device: Where payloads are broadcast from. CPU for gloo.
    """

    def __init__(
        self,
        client: InferenceClient,
        *,
        master_address: str,
        backend: str,
        timeout_seconds: float,
        device: torch.device,
    ) -> None:
        self.client = client
        self._master_address = master_address
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None
        self._executor: ThreadPoolExecutor | None = None

    @property
    def is_joined(self) -> bool:
        """Whether :meth:`push` can be called."""
        return self._group is not None

    async def join(self) -> None:
        """Makes a new group with the server, after taking down a former one.

        Raises:
            ServerError: The server cannot join, or did not in time.
        """
        await self._take_down()
        world_size = 1 + await self.client.num_workers()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"weight-push-{self.client.url}",
            initializer=_use_device,
            initargs=(self._device,),
        )
        store = _listening_store(self._master_address, world_size, self._timeout_seconds)
        self._store = store
        info = WeightGroupInfo(
            master_address=self._master_address,
            master_port=store.port,
            rank_offset=1,
            world_size=world_size,
            group_name=f"torchtitan_grpo_{uuid.uuid4().hex}",
            backend=self._backend,
            timeout_seconds=self._timeout_seconds,
        )
        try:
            self._group = await self._beside(
                functools.partial(self._create_group, info), self.client.join_weight_group(info)
            )
        except BaseException:
            await asyncio.shield(self._take_down())
            raise

    async def push(self, version: int, buckets: Iterable[Bucket]) -> PushReport:
        """Sends one version to the server and makes it serve it.

        The server is paused only when the first bucket is at hand, and it is resumed
        whatever happens. After a failure the connection is no longer joined, and a
        payload may still be read until the group's timeout.

        Args:
            version: Policy version.
            buckets: All parameters of the model. The iterator is advanced on the
                connection's thread, one bucket ahead of the broadcast.

        Raises:
            ServerError: The server refused or failed, or did not answer in time.
            RuntimeError: The connection is not joined, or the broadcast failed.
        """
        if self._group is None:
            raise RuntimeError(f"Not in a weight group with {self.client.url}: join before push.")
        iterator = iter(buckets)
        bucket = await self._on_thread(functools.partial(next, iterator, None))
        if bucket is None:
            raise ValueError("A push must hold at least one bucket.")
        num_bytes = 0
        started = time.monotonic()
        try:
            await self.client.pause()
            paused = time.monotonic()
            await self.client.begin_update()
            while bucket is not None:
                num_bytes += bucket.payload.numel()
                # Looked at before sending, since the last bucket must say that it is it.
                following = await self._on_thread(functools.partial(next, iterator, None))
                await self._send(bucket, last=following is None, version=version)
                bucket = following
            await self.client.commit_update(version)
            await self.client.resume()
        except BaseException as error:
            await asyncio.shield(self._recover(error))
            raise
        now = time.monotonic()
        return PushReport(version, num_bytes, now - started, now - paused)

    async def close(self) -> None:
        """Leaves the group; the server is told, and forgets it too."""
        if self._group is not None:
            try:
                await self.client.leave_weight_group()
            except ServerError as error:
                logger.warning("%s was not told that the trainer left: %s", self.client.url, error)
        await self._take_down()

    def _create_group(self, info: WeightGroupInfo) -> dist.ProcessGroup:
        return create_weight_group(
            info.master_address,
            info.master_port,
            0,
            info.world_size,
            info.group_name,
            info.backend,
            info.timeout_seconds * (_NCCL_PATIENCE if info.backend == "nccl" else 1),
            store=self._store,
        )

    async def _send(self, bucket: Bucket, *, last: bool, version: int) -> None:
        await self._beside(
            functools.partial(self._broadcast, bucket.payload),
            self.client.receive_bucket(bucket.spec, last=last, version=version),
        )

    def _broadcast(self, payload: torch.Tensor) -> None:
        assert self._group is not None
        payload = payload.to(self._device)
        dist.broadcast(payload, src=0, group=self._group)
        if payload.is_cuda:  # enqueued only; the payload is the caller's again when we return
            torch.cuda.current_stream(payload.device).synchronize()

    async def _beside(self, collective: Callable[[], T], request: Awaitable[None]) -> T:
        """Runs our side on the thread and asks for the server's, at the same time.

        Raises what fails first: when the server refuses, our side would wait in vain.
        Neither may outlast the timeout by more than the control request's own.
        """
        ours = asyncio.ensure_future(self._on_thread(collective))
        theirs = asyncio.ensure_future(request)
        try:
            await asyncio.wait({ours, theirs}, return_when=asyncio.FIRST_EXCEPTION)
            if ours.done() and ours.exception() is not None and not theirs.done():
                # The server's own words are the better explanation, if they come soon.
                await asyncio.wait({theirs}, timeout=_BROADCAST_GRACE_SECONDS)
            if theirs.done():
                theirs.result()
            return ours.result()
        finally:
            for task in (ours, theirs):
                task.cancel()
                task.add_done_callback(_retrieve)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        assert self._executor is not None
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def _recover(self, error: BaseException) -> None:
        """Ends the update and the group on both sides, then lets the server go on."""
        if self._backend == "nccl":
            # Its watchdog would end this process for a broadcast that nobody completes.
            await self._take_down()
        # First the server's end: it closes the sockets that our broadcast waits on.
        for step in (self.client.leave_weight_group, self.client.resume):
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    await step()
            except (ServerError, TimeoutError) as further:
                error.add_note(f"{step.__name__} after it failed, too: {further!r}")
        await self._take_down()

    async def _take_down(self) -> None:
        """Leaves the group on our side; harmless when there is none."""
        group, self._group = self._group, None
        executor, self._executor = self._executor, None
        if group is not None:
            destroy_weight_group(group)
        del group
        if executor is not None:
            # A gloo broadcast cannot be interrupted: it ends with the server's sockets,
            # or at the group's timeout. Nobody waits for that longer than this.
            idle = executor.submit(lambda: None)
            done, _ = await asyncio.wait(
                {asyncio.wrap_future(idle)}, timeout=_BROADCAST_GRACE_SECONDS
            )
            executor.shutdown(wait=bool(done), cancel_futures=True)
        self._store = None


def _listening_store(address: str, world_size: int, timeout_seconds: float) -> dist.TCPStore:
    """A store on a free port of ``address``, and of no other interface.

    Raises:
        ValueError: ``address`` is not one of this host.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(target[:2], family=family)
    except OSError as error:
        raise ValueError(
            f"weight_sync.master_address must be an address of this host, got {address!r}: {error}"
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":  # the current device is a thread's own
        torch.cuda.set_device(device)


def _retrieve(task: asyncio.Future) -> None:
    # An error that came second is not an unretrieved one.
    if not task.cancelled():
        task.exception()
