# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A source rank's end of the process group with one server.

A broadcast waits for the server. Each group therefore has its own thread for its collectives
and, over NCCL, the server's stream (see `weight_wire/device_broadcast.py`). Leaving a group may
wait for the driver, so a separate thread leaves the group. The event loop, which all servers
share, never waits.
"""

import asyncio
import errno
import functools
import logging
import socket
import threading
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.grpo.system.groups import listening_store, route_address
from torchtitan.grpo.weight_wire.device_broadcast import DeviceBroadcast
from torchtitan.grpo.weight_wire.device_lanes import aborting
from torchtitan.grpo.weight_wire.group_facts import GroupTransportName
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum time for which leaving a group waits for the communicator to be destroyed and for a
# broadcast to notice that the server has left.
_GRACE_SECONDS = 2.0
# Small, because a GPU must have this memory for each server. Large enough that a transfer over the
# fastest network takes much longer than the launch of a broadcast.
PIECE_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class GroupSettings:
    """Settings of all groups with servers.

    ``timeout_seconds`` bounds the rendezvous, and each broadcast. ``largest_bucket`` is in bytes.
    Over NCCL, servers that receive pieces are sent at most ``piece_bytes`` in one broadcast.
    """

    master_address: str
    transport: GroupTransportName
    timeout_seconds: float
    device: torch.device
    largest_bucket: int = 0
    piece_bytes: int = PIECE_BYTES
    deltas: bool = False


class GroupEnd:
    """Rank 0 of the group, beside ``world_size - 1`` workers of the server."""

    def __init__(
        self,
        server_url: str,
        world_size: int,
        backend: str,
        settings: GroupSettings,
        *,
        in_pieces: bool = False,
    ) -> None:
        self._settings = settings
        address = route_address(settings.master_address, server_url)
        try:
            store = listening_store(address, world_size, settings.timeout_seconds)
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
                raise
            raise ValueError(
                "weight_sync.master_address must be an address of this host, "
                f"got {address!r}: {error}"
            ) from error
        self._store: dist.TCPStore | None = store  # None once the group is left
        self._group: dist.ProcessGroup | None = None
        self._on_device: DeviceBroadcast | None = None
        # Held while these three are set on the group's thread, read there, or unset by leave().
        self._lock = threading.Lock()
        self._num_queued = self._num_sent = 0
        self._url = server_url
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"weight-push-{server_url}")
        self.info = WeightGroupInfo(
            master_address=address,
            master_port=store.port,
            rank_offset=1,
            world_size=world_size,
            group_name=f"torchtitan_grpo_{uuid.uuid4().hex}",
            backend=backend,
            timeout_seconds=settings.timeout_seconds,
            deltas=settings.deltas,
            piece_bytes=settings.piece_bytes if in_pieces else 0,
        )

    @property
    def _is_left(self) -> bool:
        return self._store is None

    async def join(self) -> None:
        await self._on_thread(self._create)

    def _create(self) -> None:
        info, settings, store = self.info, self._settings, self._store
        if store is None:
            raise RuntimeError(f"Group {self.info.group_name} was left before it was joined.")
        group = create_weight_group(info, 0, store)
        with ExitStack() as undo:
            undo.callback(destroy_weight_group, group)
            on_device = None
            if info.backend == "nccl":
                largest = settings.largest_bucket
                piece_bytes = min(info.piece_bytes or largest, largest)
                on_device = DeviceBroadcast(
                    settings.device, self._url, piece_bytes, settings.timeout_seconds
                )
                undo.callback(on_device.close)
            # Kept here and not by join(), which may have been cancelled in the meantime.
            with self._lock:
                if self._is_left:  # leave() was called while this thread waited for the server
                    raise RuntimeError(f"Group {info.group_name} was left before it was joined.")
                self._group, self._on_device = group, on_device
            undo.pop_all()

    async def send(self, read: Callable[[Callable[[torch.Tensor], None]], None]) -> None:
        """Broadcasts one payload to the server's workers.

        ``read`` runs on the group's thread, even after this call is cancelled. It must call its
        argument with the payload, and keep the payload alive meanwhile.
        """
        number, self._num_queued = self._num_queued, self._num_queued + 1
        await self._on_thread(functools.partial(self._send, number, read))

    def _send(self, number: int, read: Callable[[Callable[[torch.Tensor], None]], None]) -> None:
        # A broadcast that was cancelled before its turn leaves a gap. The server would mistake the
        # next broadcast for it, and gloo ends the server's process if the sizes differ.
        if number != self._num_sent:
            raise RuntimeError(
                f"Broadcast {number} in group {self.info.group_name} must follow broadcast "
                f"{number - 1}, which was cancelled."
            )
        read(self._broadcast)
        self._num_sent += 1

    def _broadcast(self, payload: torch.Tensor) -> None:
        with self._lock:
            group, on_device = self._group, self._on_device
        if group is None:  # which dist.broadcast would take for the default group
            raise RuntimeError(f"Group {self.info.group_name} has not been joined, or was left.")
        if on_device is not None:
            on_device.send(payload, group, lambda: self._is_left)
        else:
            dist.broadcast(payload, src=0, group=group)

    async def leave(self) -> None:
        """Takes the group down within a few seconds, whatever the server does; idempotent."""
        with self._lock:
            if self._is_left:
                return
            group, self._group = self._group, None
            on_device, self._on_device = self._on_device, None
            # Its sockets and its thread must end now, even if an error's traceback still refers to
            # this object.
            self._store = None
        leaving = ThreadPoolExecutor(1, thread_name_prefix=f"weight-leave-{self._url}")
        # A gloo broadcast cannot be interrupted: it ends when the server's sockets close, or at
        # the group's timeout. This method waits for it, and for NCCL's abort, at most for the
        # grace period. Broadcasts that are queued fail at once. The lane is given back behind
        # them, by the thread that has used it.
        close = on_device.close if on_device is not None else lambda: None
        ends = [asyncio.wrap_future(self._thread.submit(close))]
        if group is not None:
            gate = aborting() if on_device is not None else nullcontext()
            ends.append(asyncio.wrap_future(leaving.submit(_destroy, group, gate)))
        del group
        done, late = await asyncio.wait(ends, timeout=_GRACE_SECONDS)
        for executor in (self._thread, leaving):
            executor.shutdown(wait=not late)
        if late and on_device is not None:
            logger.warning(
                "The communicator with %s must be aborted within %g s, but NCCL or the driver has not "
                "done so. It goes on in the background, and other servers wait a few seconds for it.",
                self._url, _GRACE_SECONDS,
            )  # fmt: skip
        for end in done:
            if not end.cancelled() and (error := end.exception()) is not None:
                # The communicator is broken, and no part of it is needed any more.
                logger.warning("Leaving the group with %s failed: %s", self._url, error)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _run, call)


def _destroy(group: dist.ProcessGroup, gate: AbstractContextManager[None]) -> None:
    with gate:
        destroy_weight_group(group)


def _run(call: Callable[[], T]) -> T:
    """Runs ``call``. If it fails, clears the error's frames, which could keep groups and payloads alive."""
    try:
        return call()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
