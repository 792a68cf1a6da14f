# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pushes weights to all servers from background threads.

Every rank has one publisher. The training thread starts the copy of its shards into a slot
and goes on; threads do the rest:

    training thread     reserve_slot (rank 0) -> fence -> optimizer step -> publish
    snapshot-copy       fills the slot (CPU; on CUDA a side stream does)
    weight-publisher    event loop: on rank 0 the leader and its lanes (`leader.py`,
                        `lane.py`), elsewhere an agent that does what the leader asks
    weight-gather       sends this rank's shards to their source rank (word of them, where they
                        were copied into its memory), or is that itself
    weight-push-URL     broadcasts to one server, on source ranks

The training thread waits in `fence` alone, for a copy within this process, and in
`wait_for` where it is asked to wait for servers (the foreground mode, start and end).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchtitan.grpo.weight_sync.lane import Lane
from torchtitan.grpo.weight_sync.lane_state import LaneState
from torchtitan.grpo.weight_sync.leader import Leader
from torchtitan.grpo.weight_sync.priority import yield_to_training
from torchtitan.grpo.weight_sync.probe import Probes, is_attested
from torchtitan.grpo.weight_sync.slot_layout import Shards
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class PublisherFailed(RuntimeError):
    """The publisher's thread ended by an error; the message says which."""


class FilledSlots:
    """Which version each slot of this rank holds, or is being filled with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._versions: dict[int, int] = {}

    def put(self, slot: int, version: int) -> None:
        """The training thread is about to start the copy; nobody is woken up."""
        with self._changed:
            self._versions[slot] = version

    def wake(self) -> None:
        """Lets whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, slot: int, version: int, timeout_seconds: float) -> None:
        """This rank's training thread may be a little behind rank 0's.

        Raises:
            TimeoutError: Much.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._versions.get(slot) == version, timeout_seconds
            ):
                raise TimeoutError(
                    f"This rank must have published version {version} within "
                    f"{timeout_seconds:g} s of rank 0; slot {slot} holds "
                    f"{self._versions.get(slot)}."
                )


class WeightPublisher:
    """The background push; see the module's docstring.

    Args:
        snapshots: This rank's slots.
        filled: Which versions they hold.
        slots: Their states; rank 0's decisions alone count.
        probes: What the trainer expects servers to answer.
        attest_every: ``weight_sync.attest_every``.
        make_leader: On rank 0, called in the thread's own event loop; given what to call
            after each change of a lane.
        follow: Elsewhere: does what the leader asks, until cancelled.
    """

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        filled: FilledSlots,
        slots: SlotTable,
        probes: Probes,
        attest_every: int,
        make_leader: Callable[[Callable[[], None]], Leader] | None,
        follow: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.snapshots, self.slots, self.probes = snapshots, slots, probes
        self.is_leader = make_leader is not None
        self.error: BaseException | None = None
        self._attest_every = attest_every
        self._filled, self._make_leader, self._follow = filled, make_leader, follow
        self._leader: Leader | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._published = -1
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

        def announce() -> None:
            self._filled.put(slot, version)
            if self.is_leader:
                self.slots.filled(slot, version)

        self._published = version
        self.snapshots.copy_into(slot, announce, self._wake_readers)

    def _wake_readers(self) -> None:
        self._filled.wake()
        self.slots.wake()

    def is_attested(self, version: int) -> bool:
        """Whether servers are to be asked for log-probabilities under ``version``."""
        return is_attested(version, self._attest_every)

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        """Leader: waits until the servers serve ``version`` or something newer.

        Lost servers are not waited for, as long as one that is not lost is there: its lane
        has bounds of its own, unless the version cannot be written for it.

        Args:
            version: Policy version.
            timeout_seconds: How long there may be no server that could take it.
            should_stop: Ends the wait.

        Raises:
            TimeoutError: They were, for longer; says why.
            PublisherFailed: Its thread died.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._are_served(version) and not should_stop():
                self.raise_if_failed()
                if any(not (lane.is_lost or lane.is_blocked) for lane in self.lanes):
                    deadline = time.monotonic() + timeout_seconds
                elif time.monotonic() > deadline:
                    raise TimeoutError(
                        f"A server must take policy_version {version}, but for {timeout_seconds:.0f} s "
                        f"none was there that could: {self._describe_lag(version)}. Check their "
                        "logs, or raise weight_sync.timeout_seconds."
                    )
                self._changed.wait(_POLL_SECONDS)

    @property
    def lanes(self) -> Sequence[Lane]:
        """Leader: one for each server."""
        return self._leader.lanes if self._leader is not None else []

    @property
    def num_failures(self) -> int:
        """How often a server was lost."""
        return sum(lane.num_failures for lane in self.lanes)

    def metrics(self) -> dict[str, float]:
        """The state of the push, for the step's metrics; on the leader."""
        lanes = self.lanes
        served = [lane.version for lane in lanes if not lane.is_lost]
        reports = [lane.last_push for lane in lanes if lane.last_push is not None]
        totals = {
            "server_version": float(min(served, default=-1)),
            "servers": float(len(lanes)),
            "lost_servers": float(len(lanes) - len(served)),
            "pushes": float(sum(lane.num_pushes for lane in lanes)),
            "attested": float(sum(lane.num_attested for lane in lanes)),
            "failures": float(self.num_failures),
            "superseded": float(self.slots.num_superseded),
            "versions_alive": float(self._leader.num_versions if self._leader else 0),
            "gather_seconds": self._leader.gather_seconds if self._leader else 0.0,
            "push_seconds": max((r.push_seconds for r in reports), default=0.0),
            "pause_seconds": max((r.pause_seconds for r in reports), default=0.0),
            "push_bytes": float(max((r.num_bytes for r in reports), default=0)),
        }
        for index, lane in enumerate(lanes):
            for name, value in lane_metrics(lane, self._published).items():
                totals[f"server{index}/{name}"] = value
        return {f"weight_sync/{name}": value for name, value in totals.items()}

    def raise_if_failed(self) -> None:
        """Raises what ended the publisher's thread, if anything did."""
        error = self.failure
        if error is not None:
            raise PublisherFailed(f"The weight publisher failed: {error}") from error

    @property
    def failure(self) -> BaseException | None:
        """What has ended this rank's part of the push, if anything has."""
        if self.error is None and self._leader is not None:
            return self._leader.error  # it may still be clearing up
        return self.error

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Ends the threads; a push under way is given up after the timeout. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "The weight publisher did not end within %.1f s; it is left to the process's end.",
                timeout_seconds,
            )
        try:
            self.snapshots.close(timeout_seconds)
        except TimeoutError as error:  # others are still to be closed
            logger.warning("%s It is left to the process's end.", error)

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
        yield_to_training()
        try:
            asyncio.run(self._lead() if self.is_leader else self._serve())
        except BaseException as error:  # the thread's boundary: kept for the training thread
            if not self._closing.is_set():
                self.error = error
                if not self.is_leader:  # the leader's training thread raises it
                    logger.error("The weight publisher failed: %s", error)
            self._notify()

    async def _lead(self) -> None:
        assert self._make_leader is not None
        leader = self._leader = self._make_leader(self._notify)
        await leader.run(self._closing.is_set)

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._follow(), name="agent")
        while not self._closing.is_set() and not serving.done():
            await asyncio.wait({serving}, timeout=_POLL_SECONDS)
        serving.cancel()
        (result,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def lane_metrics(lane: Lane, published: int) -> dict[str, float]:
    """One server's, by name.

    Args:
        lane: The server's.
        published: The newest version that there is; the lag is against it.
    """
    report = lane.last_push
    return {
        "state": float(list(LaneState).index(lane.state)),
        "version": float(lane.version),
        "lag": float(published - lane.version),
        "failures": float(lane.num_failures),
        "push_seconds": report.push_seconds if report else 0.0,
        "pause_ms": 1e3 * report.pause_seconds if report else 0.0,
        "gb_per_second": report.num_bytes / 1e9 / max(report.transfer_seconds, 1e-9)
        if report
        else 0.0,
    }


def read_snapshot(
    snapshots: Snapshots, filled: FilledSlots, timeout_seconds: float
) -> Callable[[int, int], Shards]:
    """What an agent reads its shards with."""

    def read(slot: int, version: int) -> Shards:
        filled.wait_for(slot, version, timeout_seconds)
        return snapshots.read(slot)

    return read
