# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pushes weights to all servers from a background thread.

Every rank has one publisher. The training thread fills a slot and goes on; the threads do
the rest. Rank 0's thread leads, the others follow its commands:

    leader    consumes: filled slots.  produces: gathered versions, for the lanes.
              waits for: a filled slot, the followers' shards.
    lane      one for each server, in the leader's event loop; see `lane.py`.
    follower  consumes: the leader's commands.  produces: its shards.
              waits for: a snapshot of its own, then for a command.

The leader gathers everything into buffers of its own first and lets go of the slot, so a
slow server holds up neither a slot, nor another rank, nor another server.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchtitan.grpo.groups import new_group
from torchtitan.grpo.weight_sync.connection import Bucket, ServerConnection
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.lane import Lane
from torchtitan.grpo.weight_sync.payloads import Gathered, Payloads
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots

logger = logging.getLogger(__name__)

# How often an idle thread looks whether it should end.
_POLL_SECONDS = 0.2


class PublisherFailed(RuntimeError):
    """The publisher's thread ended by an error; the message says which."""


class WeightPublisher:
    """The background push; see the module's docstring.

    Constructed on all ranks at the same time.

    Args:
        snapshots: This rank's slots.
        slots: Their states; the leader's decisions alone count.
        gatherer: This rank's part in the gathering.
        make_connections: On the leader, builds the connections in the thread's own event
            loop; None on followers.
        on_version: Told (url, version) when a server has confirmed a version.
        on_lost: Told (url, reason) when a push has failed.
        command_timeout_seconds: How long a follower waits for a command once it holds a
            snapshot: longer than any push may take.
    """

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        slots: SlotTable,
        gatherer: Gatherer,
        make_connections: Callable[[], list[ServerConnection]] | None,
        on_version: Callable[[str, int], None],
        on_lost: Callable[[str, str], None],
        command_timeout_seconds: float,
    ) -> None:
        self.snapshots, self.slots, self.gatherer = snapshots, slots, gatherer
        self.is_leader = make_connections is not None
        self.lanes: list[Lane] = []
        self.gather_seconds = 0.0
        self.error: BaseException | None = None
        self._make_connections = make_connections
        self._on_version, self._on_lost = on_version, on_lost
        self._commands = new_group("grpo_publisher", "gloo", command_timeout_seconds)
        self._changed = threading.Condition()
        self._closing = False
        self._slot_versions: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    # -- training thread ---------------------------------------------------------------

    def reserve_slot(self) -> int:
        """Leader: the slot that the next version goes into."""
        return self.slots.reserve()

    def fence(self) -> None:
        """Before the optimizer step: it must not overwrite what is still being copied."""
        self.snapshots.fence()

    def publish(self, version: int, slot: int) -> None:
        """After the optimizer step: starts the copy, hands it over, and returns."""
        self.snapshots.copy_into(slot)
        with self._changed:
            self._slot_versions[slot] = version
            self._changed.notify_all()
        if self.is_leader:
            self.slots.filled(slot, version)

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        """Leader: waits until the servers serve ``version`` or something newer.

        Lost servers are not waited for, as long as one that is not lost is there.

        Raises:
            TimeoutError: Not in time; names the servers that lag.
            PublisherFailed: Its thread died.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._are_served(version) and not should_stop():
                self.raise_if_failed()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Pushing policy_version {version} must end within {timeout_seconds:.0f} s, "
                        f"but these servers lag: {self._describe_lag(version)}. Check their "
                        "logs, or raise weight_sync.timeout_seconds."
                    )
                self._changed.wait(_POLL_SECONDS)

    @property
    def num_failures(self) -> int:
        """How often a server was lost."""
        return sum(lane.num_failures for lane in self.lanes)

    def metrics(self) -> dict[str, float]:
        """The state of the push, for the step's metrics; on the leader."""
        served = [lane.version for lane in self.lanes if not lane.is_lost]
        reports = [lane.last_push for lane in self.lanes if lane.last_push is not None]
        return {
            "weight_sync/server_version": float(min(served, default=-1)),
            "weight_sync/lost_servers": float(len(self.lanes) - len(served)),
            "weight_sync/pushes": float(sum(lane.num_pushes for lane in self.lanes)),
            "weight_sync/failures": float(self.num_failures),
            "weight_sync/superseded": float(self.slots.num_superseded),
            "weight_sync/gather_seconds": self.gather_seconds,
            "weight_sync/push_seconds": max((r.push_seconds for r in reports), default=0.0),
            "weight_sync/pause_seconds": max((r.pause_seconds for r in reports), default=0.0),
            "weight_sync/push_bytes": float(max((r.num_bytes for r in reports), default=0)),
        }

    def raise_if_failed(self) -> None:
        """Raises what ended the publisher's thread, if anything did."""
        if self.error is not None:
            raise PublisherFailed(f"The weight publisher failed: {self.error}") from self.error

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Ends the thread; a push under way is given up after the timeout."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "The weight publisher did not end within %.1f s; it is left to the process's end.",
                timeout_seconds,
            )

    def _are_served(self, version: int) -> bool:
        present = [lane for lane in self.lanes if not lane.is_lost]
        return bool(present) and all(lane.version >= version for lane in present)

    def _describe_lag(self, version: int) -> str:
        return "; ".join(
            f"{lane.url} is {lane.state.value}, serves version {lane.version}"
            + (f" ({lane.last_error})" if lane.last_error else "")
            for lane in self.lanes
            if lane.version < version
        )

    # -- publisher's thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self.is_leader:
                asyncio.run(self._lead())
            else:
                self._follow()
        except BaseException as error:  # the thread's boundary: kept for the training thread
            if not self._closing:
                self.error = error
                if not self.is_leader:  # the leader's training thread raises it
                    logger.error("The weight publisher failed: %s", error)
            with self._changed:
                self._changed.notify_all()

    def _follow(self) -> None:
        done = -1
        while self._wait_for_snapshot_after(done):
            command = torch.empty(2, dtype=torch.int64)
            dist.broadcast(command, src=0, group=self._commands)
            slot, done = command.tolist()
            self._read_shards(slot, done, None)

    def _wait_for_snapshot_after(self, done: int) -> bool:
        """True once this rank holds something newer; False when closing."""
        with self._changed:
            while not self._closing:
                if max(self._slot_versions.values(), default=-1) > done:
                    return True
                self._changed.wait(_POLL_SECONDS)
        return False

    def _read_shards(
        self, slot: int, version: int, buffers: list[torch.Tensor] | None
    ) -> list[Bucket]:
        with self._changed:
            # This rank's training thread may be a little behind rank 0's.
            while self._slot_versions.get(slot) != version:
                self._changed.wait(_POLL_SECONDS)
                if self._closing:
                    raise RuntimeError("closed while waiting for a snapshot")
        buckets = self.gatherer.gather(self.snapshots.read(slot), buffers)
        # Nobody may fill the slot again before all have read it.
        dist.barrier(group=self._commands)
        return buckets

    async def _lead(self) -> None:
        assert self._make_connections is not None
        payloads = Payloads()
        lanes = [
            Lane(
                connection,
                payloads,
                on_change=self._notify,
                on_version=self._on_version,
                on_lost=self._on_lost,
            )
            for connection in self._make_connections()
        ]
        with self._changed:
            self.lanes = lanes
        tasks = [asyncio.create_task(lane.run(), name=lane.url) for lane in lanes]
        try:
            await self._gather_versions(payloads, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(lane.close() for lane in lanes))

    async def _gather_versions(self, payloads: Payloads, lanes: list[asyncio.Task[None]]) -> None:
        while not self._closing:
            for lane in lanes:
                if lane.done():
                    await lane  # raises what ended it
            taken = await asyncio.to_thread(self.slots.take_newest, _POLL_SECONDS)
            if taken is not None:
                slot, version = taken
                buffers = payloads.free_buffers()
                buckets = await asyncio.to_thread(self._gather, slot, version, buffers)
                await payloads.put(Gathered(version, buckets))

    def _gather(self, slot: int, version: int, buffers: list[torch.Tensor] | None) -> list[Bucket]:
        begin = time.perf_counter()
        dist.broadcast(torch.tensor([slot, version]), src=0, group=self._commands)
        buckets = self._read_shards(slot, version, buffers or self.gatherer.new_buffers())
        self.slots.release(slot)
        self.gather_seconds = time.perf_counter() - begin
        return buckets

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
