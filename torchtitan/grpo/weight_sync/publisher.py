# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pushes weights to all servers from background threads.

Every rank has one publisher. The training thread starts the copy of its shards into a slot and
continues; other threads do the rest:

    training thread     reserve_slot (rank 0) -> fence -> optimizer step -> publish
    snapshot-copy       fills the slot on CPU; on CUDA, a side stream fills it
    weight-publisher    runs an event loop: on rank 0 the leader and its lanes (`leader.py`,
                        `lane.py`), on other ranks an agent that does what the leader asks
    weight-gather       waits for a version's copy; sends this rank's shards to a source rank, or
                        notifies it if they were copied into its memory; on a source rank, receives
                        them. With several sources, a thread weight-gather-source does so for each
    weight-push-URL     broadcasts to one server, on source ranks

The training thread waits in two places: in `fence`, for a copy within this process, and in
`wait_for`, for servers (in the foreground mode, and at the start and the end of a run).
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.process_tuning import yield_to_training
from torchtitan.grpo.weight_sync.attestation import Probes, is_attested
from torchtitan.grpo.weight_sync.lane import Lane, LaneState
from torchtitan.grpo.weight_sync.leader import Leader
from torchtitan.grpo.weight_sync.slots import SlotTable, SlotVersions
from torchtitan.grpo.weight_sync.snapshot import Snapshots
from torchtitan.grpo.weight_sync.transports.interface import PushReport

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class PublisherFailed(RunError):
    """An error has ended the publisher's thread. The message names the error."""


class Publisher:
    """A publisher that sends nothing, for runs without servers, such as a replay.

    The training thread calls its methods. ``probes`` are the trainer's log-probabilities of the probe
    tokens, by version; ``failure`` is the error that ended this rank's part of the push.
    """

    def __init__(self, probes: Probes | None = None) -> None:
        self.probes = probes or Probes()

    @property
    def failure(self) -> BaseException | None:
        return None

    @property
    def num_failures(self) -> int:
        return 0

    def is_attested(self, version: int) -> bool:
        return False

    def reserve_slot(self) -> int:
        """Reserves a slot for the next :meth:`publish`, and returns its index. Called on rank 0."""
        return 0

    def fence(self) -> None:
        """Orders the next optimizer step after the last copy of the parameters."""

    def publish(self, version: int, slot: int) -> None:
        """Starts a push after the optimizer step; ``slot`` is the one that rank 0 reserved."""

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        """Waits until the servers serve ``version`` or a newer one; called on rank 0.

        Does not wait for lost or sleeping servers while another one is present. The timeouts of a
        present server's lane bound its wait. Raises TimeoutError if for ``timeout_seconds`` no server
        could take the version, and PublisherFailed as :meth:`raise_if_failed` does.
        """

    def pin(self, version: int | None) -> list[str]:
        """Keeps one of several servers at the first version not older than ``version``; on rank 0.

        ``None`` lets every server take new versions again. The only server of a run is never
        pinned, because training needs one with current weights. For the same reason, a pin ends when
        no other server is left or takes new versions. Returns :meth:`pinned`.
        """
        return []

    def pinned(self) -> list[str]:
        """Returns the URL of the server that is pinned now, if there is one."""
        return []

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the push. Called on rank 0, at each step."""
        return {}

    def server_states(self) -> dict[str, dict[str, str | int]]:
        """Returns the state of each server by URL. Any thread may call this."""
        return {}

    def raise_if_failed(self) -> None:
        """Raises PublisherFailed if this rank's part of the push has ended."""

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Ends the push, and abandons work that takes longer than the timeout. It is idempotent."""


class WeightPublisher(Publisher):
    """Pushes weights in the background; see the module's docstring.

    On rank 0, ``slots`` is a :class:`SlotTable`, and ``make_leader`` makes the leader, which calls the
    given function after each change of a lane. On other ranks, ``follow`` does what the leader asks.
    """

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        slots: SlotVersions,
        probes: Probes,
        attest_every: int,
        make_leader: Callable[[Callable[[], None]], Leader] | None,
        follow: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(probes)
        self.snapshots, self.slots = snapshots, slots
        self.error: BaseException | None = None
        self._attest_every, self._follow = attest_every, follow
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._leader = make_leader(self._notify) if make_leader is not None else None
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    # -- training thread ---------------------------------------------------------------

    def reserve_slot(self) -> int:
        assert isinstance(self.slots, SlotTable), "only rank 0 reserves slots"
        return self.slots.reserve()

    def fence(self) -> None:
        self.snapshots.fence()

    def publish(self, version: int, slot: int) -> None:
        announce = functools.partial(self.slots.filled, slot, version)
        self.snapshots.copy_into(slot, announce, self.slots.wake)

    def is_attested(self, version: int) -> bool:
        return is_attested(version, self._attest_every)

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._are_served(version) and not should_stop():
                self.raise_if_failed()
                if any(not (s.is_lost or s.is_blocked or s.is_asleep) for s in self.lanes):
                    deadline = time.monotonic() + timeout_seconds
                elif time.monotonic() > deadline:
                    raise TimeoutError(
                        f"A server must take policy_version {version}, but no server could take it "
                        f"for {timeout_seconds:.0f} s: {self._describe_lag(version)}. Check the "
                        "servers' logs, or raise weight_sync.timeout_seconds."
                    )
                self._changed.wait(_POLL_SECONDS)

    def pin(self, version: int | None) -> list[str]:
        assert self._leader is not None, "only rank 0 pins servers"
        self._leader.pin.set(self.lanes, version)
        return self.pinned()

    def pinned(self) -> list[str]:
        url = self._leader.pin.url if self._leader is not None else None
        return [url] if url is not None else []

    @property
    def lanes(self) -> Sequence[Lane]:
        return self._leader.lanes if self._leader is not None else []

    @property
    def num_failures(self) -> int:
        return sum(lane.num_failures for lane in self.lanes)

    def metrics(self) -> dict[str, float]:
        assert isinstance(self.slots, SlotTable), "only rank 0 has metrics of the push"
        lanes = self.lanes
        present = [lane for lane in lanes if not lane.is_lost]
        served = [lane.version for lane in present if not lane.is_asleep]
        reports = [lane.last_push for lane in lanes if lane.last_push is not None]
        totals = {
            "server_version": float(min(served, default=-1)),
            "servers": float(len(lanes)),
            "lost_servers": float(len(lanes) - len(present)),
            "pushes": float(sum(lane.num_pushes for lane in lanes)),
            "attested": float(sum(lane.num_attested for lane in lanes)),
            "failures": float(self.num_failures),
            "superseded": float(self.slots.num_superseded),
            "versions_alive": float(self._leader.versions.num_alive if self._leader else 0),
            "fence_seconds": self.snapshots.stalled_seconds,
            "gather_seconds": self._leader.gather_seconds if self._leader else 0.0,
            "push_seconds": max((r.push_seconds for r in reports), default=0.0),
            "pause_seconds": max((r.pause_seconds for r in reports), default=0.0),
            "push_bytes": float(max((r.num_bytes for r in reports), default=0)),
        }
        for index, lane in enumerate(lanes):
            for name, value in lane_metrics(lane, self.slots.published).items():
                totals[f"server{index}/{name}"] = value
        return {f"weight_sync/{name}": value for name, value in totals.items()}

    def server_states(self) -> dict[str, dict[str, str | int]]:
        return {
            lane.url: {"state": lane.state.value, "version": lane.version}
            for lane in list(self.lanes)
        }

    def raise_if_failed(self) -> None:
        error = self.failure
        if error is not None:
            raise PublisherFailed(
                f"The weight publisher failed, so no server receives new weights: {error}"
            ) from error

    @property
    def failure(self) -> BaseException | None:
        if self.error is None and self._leader is not None:
            return self._leader.error  # set while the leader may still be closing
        return self.error

    def close(self, timeout_seconds: float = 2.0) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "The weight publisher did not end within %.1f s. It will end with the process.",
                timeout_seconds,
            )
        try:
            self.snapshots.close(timeout_seconds)
        except TimeoutError as error:  # not raised, because the caller has more to close
            logger.warning("%s The thread will end with the process.", error)

    def _are_served(self, version: int) -> bool:
        present = [lane for lane in self.lanes if not (lane.is_lost or lane.is_asleep)]
        return bool(present) and all(lane.version >= version for lane in present)

    def _describe_lag(self, version: int) -> str:
        return "; ".join(
            f"{lane.url} is {lane.state.value} and serves version {lane.version}"
            + (f" ({lane.last_error})" if lane.last_error else "")
            for lane in self.lanes
            if lane.version < version
        )

    # -- publisher's thread ------------------------------------------------------------

    def _run(self) -> None:
        yield_to_training()
        try:
            leader = self._leader
            asyncio.run(self._serve() if leader is None else leader.run(self._closing.is_set))
        except BaseException as error:  # the thread's boundary; the training thread raises it
            if not self._closing.is_set():
                self.error = error
                if self._leader is None:  # the leader's training thread raises it
                    logger.error("The weight publisher failed: %s", error)
            self._notify()

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
    report = lane.last_push or PushReport(-1, 0, 0.0, 0.0, 0.0)
    return {
        "state": float(list(LaneState).index(lane.state)),
        "version": float(lane.version),
        "lag": 0.0 if lane.is_asleep else float(published - lane.version),
        "failures": float(lane.num_failures),
        "push_seconds": report.push_seconds,
        "pause_ms": 1e3 * report.pause_seconds,
        "gb_per_second": report.gb_per_second,
    }
