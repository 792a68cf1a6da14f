# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pushes weights to all servers from a background thread.

Every rank has one publisher. The training thread fills a slot and goes on; the threads do
the rest. Rank 0's thread leads, the others follow its commands:

    leader    consumes: filled slots.  produces: buckets on the servers, versions.
              waits for: a filled slot, the followers' shards, the servers (with timeouts).
    follower  consumes: the leader's commands.  produces: its shards.
              waits for: a snapshot of its own, then for a command.

The leader gathers everything into host memory first and lets go of the slot, so a slow
server holds up neither a slot nor another rank. All servers are pushed to at the same
time. A server that fails is reported lost and is joined anew, with the newest weights,
until it answers; the others do not notice.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchtitan.grpo.groups import new_group
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.weight_sync.connection import Bucket, PushReport, ServerConnection
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots

logger = logging.getLogger(__name__)

# How often an idle thread looks whether it should end.
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 2.0
_LOSSES = (ServerError, OSError, TimeoutError, RuntimeError)
"""What a push may fail with on account of the server; RuntimeError covers torch's own."""


class PublisherFailed(RuntimeError):
    """The publisher's thread ended by an error; the message says which."""


@dataclass
class SyncStatus:
    """What is known of the servers, for metrics. Written by the leader's thread.

    Attributes:
        server_versions: Newest version that each server has confirmed, by URL; -1 before
            the first push and while a server is lost.
        num_pushes: Completed pushes, counted per server.
        num_failures: Failed pushes, counted per server.
        last_errors: Why the last push to a server failed, by URL, until one succeeds.
        gather_seconds: Of the last version.
        last_push: Report of the last completed push, the slowest server's.
    """

    server_versions: dict[str, int] = field(default_factory=dict)
    num_pushes: int = 0
    num_failures: int = 0
    last_errors: dict[str, str] = field(default_factory=dict)
    gather_seconds: float = 0.0
    last_push: PushReport | None = None


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
        self.status = SyncStatus()
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
        """Leader: waits until every server serves ``version`` or a newer one.

        Raises:
            TimeoutError: Not in time; names the servers that lag.
            PublisherFailed: Its thread died.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._behind(version) and not should_stop():
                self.raise_if_failed()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Pushing policy_version {version} must end within {timeout_seconds:.0f} s, "
                        f"but these servers lag: {self._describe_behind(version)}. Check their "
                        "logs, or raise weight_sync.timeout_seconds."
                    )
                self._changed.wait(_POLL_SECONDS)

    def metrics(self) -> dict[str, float]:
        """The state of the push, for the step's metrics; on the leader."""
        status, report = self.status, self.status.last_push
        versions = status.server_versions.values()
        return {
            "weight_sync/server_version": float(min(versions, default=-1)),
            "weight_sync/pushes": float(status.num_pushes),
            "weight_sync/failures": float(status.num_failures),
            "weight_sync/superseded": float(self.slots.num_superseded),
            "weight_sync/gather_seconds": status.gather_seconds,
            "weight_sync/push_seconds": report.push_seconds if report else 0.0,
            "weight_sync/pause_seconds": report.pause_seconds if report else 0.0,
            "weight_sync/push_bytes": float(report.num_bytes if report else 0),
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

    def _behind(self, version: int) -> dict[str, int]:
        versions = self.status.server_versions
        if not versions:
            return {"<no server joined yet>": -1}
        return {url: have for url, have in versions.items() if have < version}

    def _describe_behind(self, version: int) -> str:
        errors = self.status.last_errors
        return "; ".join(
            f"{url} serves version {have}" + (f" ({errors[url]})" if url in errors else "")
            for url, have in self._behind(version).items()
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
            self._read_shards(slot, done, keep=False)

    def _wait_for_snapshot_after(self, done: int) -> bool:
        """True once this rank holds something newer; False when closing."""
        with self._changed:
            while not self._closing:
                if max(self._slot_versions.values(), default=-1) > done:
                    return True
                self._changed.wait(_POLL_SECONDS)
        return False

    def _read_shards(self, slot: int, version: int, *, keep: bool) -> list[Bucket]:
        with self._changed:
            # This rank's training thread may be a little behind rank 0's.
            while self._slot_versions.get(slot) != version:
                self._changed.wait(_POLL_SECONDS)
                if self._closing:
                    raise RuntimeError("closed while waiting for a snapshot")
        buckets = self.gatherer.gather(self.snapshots.read(slot), keep=keep)
        # Nobody may fill the slot again before all have read it.
        dist.barrier(group=self._commands)
        return buckets

    async def _lead(self) -> None:
        assert self._make_connections is not None
        connections = self._make_connections()
        with self._changed:
            self.status.server_versions = {c.client.url: -1 for c in connections}
        buckets: list[Bucket] = []
        version = -1
        try:
            while not self._closing:
                lagging = [
                    c for c in connections if self.status.server_versions[c.client.url] < version
                ]
                wait = _RETRY_SECONDS if lagging else _POLL_SECONDS
                taken = await asyncio.to_thread(self.slots.take_newest, wait)
                if taken is not None:
                    slot, version = taken
                    buckets = await asyncio.to_thread(self._gather, slot, version)
                    lagging = connections
                await asyncio.gather(*(self._push(c, version, buckets) for c in lagging))
        finally:
            for connection in connections:
                await connection.close()
                await connection.client.close()

    def _gather(self, slot: int, version: int) -> list[Bucket]:
        begin = time.perf_counter()
        dist.broadcast(torch.tensor([slot, version]), src=0, group=self._commands)
        buckets = self._read_shards(slot, version, keep=True)
        self.slots.release(slot)
        self.status.gather_seconds = time.perf_counter() - begin
        return buckets

    async def _push(
        self, connection: ServerConnection, version: int, buckets: list[Bucket]
    ) -> None:
        url = connection.client.url
        try:
            if not connection.is_joined:
                await connection.join()
            report = await connection.push(version, buckets)
        except _LOSSES as error:
            self.status.num_failures += 1
            self.status.last_errors[url] = str(error)
            self._set_version(url, -1)
            logger.warning("Pushing policy_version %d to %s failed: %s", version, url, error)
            self._on_lost(url, str(error))
            return
        self.status.num_pushes += 1
        self.status.last_push = report
        self.status.last_errors.pop(url, None)
        self._on_version(url, version)
        self._set_version(url, version)

    def _set_version(self, url: str, version: int) -> None:
        with self._changed:
            self.status.server_versions[url] = version
            self._changed.notify_all()
