# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A lane keeps one server at the newest version.

After each push, a lane takes the newest version and skips those in between. It waits only for
its own server, each time with a timeout, so a slow, stopped or dead server delays no other. A
lost server gets no work until it has joined again and has confirmed the newest weights.

             +------------------- newer_version --------------------+
             v                                                      |
    JOINING ---joined---> SYNCING ---committed---> ATTESTING ---attested---> READY
       ^                     |                         |                       |
       |                     | failed                  | failed,               | failed,
   retry_due                 |                         | version_mismatch      | version_mismatch
       |                     v                         v                       |
       +------------------ LOST <-----------------------------------------------+

A failure in JOINING leads to LOST as well, and every state but CLOSED leads to CLOSED when the
server is removed. A lane joins when it has a version to send. The first push after a join sends
everything, because the server may be a new process.

A lent server sleeps while the training ranks use its devices::

    JOINING, SYNCING, ATTESTING, READY, LOST --asleep--> ASLEEP --wanted--> JOINING

When its server is no longer wanted, the lane cancels whatever it is doing, even a push, except the
request to wake. A server that does not fall asleep is LOST until it is wanted again; the rollout
process ends the server. JOINING begins with the request to wake. If nothing was cancelled, the process
groups outlast the sleep. The weights never do: the next push sends everything.

The state determines what the dispatcher may assume:

- It learns of a version at ``attested`` and never before. By then, the server has answered the
  commit and has afterwards reported the version itself.
- During the next push of a READY lane it continues to assume the former version, with which the
  server generates until it commits; the server reports the version of every token.
- It learns of a loss at ``failed`` and ``version_mismatch``, before the lane recovers (leaves
  the process groups and ends the server's pause). The retry is due after the recovery.
- It learns at ``asleep`` that the server uses its devices no more.

A READY lane asks repeatedly for the server's version, which alone reveals a server that was
restarted with other weights.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.waits import Backoff, Reminders, in_full
from torchtitan.grpo.weight_sync.attestation import (
    Attestation,
    AttestationFailed,
    ServerAttestation,
)
from torchtitan.grpo.weight_sync.transports.interface import Connection, NotPrepared, PushReport
from torchtitan.grpo.weight_sync.versions import ServerVersions, Versions

logger = logging.getLogger(__name__)

# Interval at which an idle lane asks whether the server still serves what was pushed.
_CHECK_SECONDS = 5.0
# Interval at which a held lane checks whether another thread has released it.
_HELD_SECONDS = 0.05
# More than one refusal of the first weights is allowed, because a server may still be busy with an
# update that an earlier trainer left behind.
_MAX_REFUSALS = 3
_LOSSES = (ServerError, OSError, TimeoutError, RuntimeError)
"""Exceptions that a server may cause in a push; torch raises RuntimeError."""


class LaneState(Enum):
    JOINING = "joining"
    SYNCING = "syncing"
    """A version is being sent, up to the answer to the commit."""
    ATTESTING = "attesting"
    """The weights that the server serves are being compared with those that were sent."""
    READY = "ready"
    """The server serves an attested version, and no push is under way."""
    LOST = "lost"
    """The lane recovers from a failure, then waits until it is time to join again."""
    CLOSED = "closed"
    ASLEEP = "asleep"
    """The server has given its devices back to the training ranks."""


class LaneEvent(Enum):
    JOINED = "joined"
    NEWER_VERSION = "newer_version"
    COMMITTED = "committed"
    ATTESTED = "attested"
    FAILED = "failed"
    """A request or a transfer failed. The lane records the reason; the next state is LOST."""
    VERSION_MISMATCH = "version_mismatch"
    RETRY_DUE = "retry_due"
    REMOVED = "removed"
    ASLEEP = "asleep"
    WANTED = "wanted"


_NEXT = {
    (LaneState.JOINING, LaneEvent.JOINED): LaneState.SYNCING,
    (LaneState.JOINING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.SYNCING, LaneEvent.COMMITTED): LaneState.ATTESTING,
    (LaneState.SYNCING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.ATTESTING, LaneEvent.ATTESTED): LaneState.READY,
    (LaneState.ATTESTING, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.ATTESTING, LaneEvent.VERSION_MISMATCH): LaneState.LOST,
    (LaneState.READY, LaneEvent.NEWER_VERSION): LaneState.SYNCING,
    (LaneState.READY, LaneEvent.FAILED): LaneState.LOST,
    (LaneState.READY, LaneEvent.VERSION_MISMATCH): LaneState.LOST,
    (LaneState.LOST, LaneEvent.RETRY_DUE): LaneState.JOINING,
    (LaneState.LOST, LaneEvent.FAILED): LaneState.LOST,  # it does not fall asleep
    (LaneState.ASLEEP, LaneEvent.WANTED): LaneState.JOINING,
} | {
    (state, event): following
    for event, following in (
        (LaneEvent.REMOVED, LaneState.CLOSED),
        (LaneEvent.ASLEEP, LaneState.ASLEEP),
    )
    for state in LaneState
    if state not in (LaneState.CLOSED, following)
}


def next_state(state: LaneState, event: LaneEvent) -> LaneState:
    """Returns the state after an event; raises ValueError if the event must not happen in ``state``."""
    following = _NEXT.get((state, event))
    if following is None:
        possible = sorted(e.value for s, e in _NEXT if s is state)
        raise ValueError(
            f"A lane that is {state.value} can take {possible or 'no event'}, but got {event.value!r}."
        )
    return following


class WeightsRefused(RuntimeError):
    """A server that was present at the start of the run refuses the run's weights."""


class VersionMismatch(ServerError):
    """The server does not serve the weights that were pushed to it."""


@dataclass(frozen=True)
class Listeners:
    """Callbacks for the changes of a lane; called in the leader's event loop.

    ``on_change`` follows each change of a public attribute. ``on_version`` gets URL, confirmed
    version and the seconds of the server's pause, ``on_lost`` URL and reason, ``on_asleep`` the URL.
    """

    on_change: Callable[[], None]
    on_version: Callable[[str, int, float], None]
    on_lost: Callable[[str, str], None]
    on_asleep: Callable[[str], None]


class Lane:
    """Keeps one server at the newest version; see the module's docstring.

    ``num_attested`` counts confirmed pushes that were attested by log-probabilities. The lane
    ``is_blocked`` if the trainer could not prepare the newest version. Once the server has
    confirmed version ``held_from`` or a newer one, no newer one is pushed to it; any thread may set
    ``held_from``.
    """

    def __init__(
        self,
        connection: Connection,
        versions: Versions,
        sync: WeightSync,
        attestation: Attestation,
        listeners: Listeners,
        *,
        is_initial: bool = False,
        is_lent: bool = False,
    ) -> None:
        self.url = connection.client.url
        self.state = LaneState.JOINING
        self.num_pushes = self.num_attested = self.num_failures = 0
        self.is_blocked = False
        self.last_error = ""
        self.last_push: PushReport | None = None
        self.held_from: int | None = None
        self._connection, self._client = connection, connection.client
        self._versions, self._listeners = versions, listeners
        self._sync = sync
        self._attestation = ServerAttestation(attestation, self._client)
        self._backoff = Backoff(sync.retry_seconds, sync.max_retry_seconds)
        self._server = ServerVersions(versions)
        # Counts the refusals in a row; None once they no longer end the run.
        self._num_refusals = 0 if is_initial else None
        self._lost_at: float | None = None
        self._reminders = Reminders()
        self._is_lent, self._is_joined = is_lent, False
        self._track, self._since = f"weights {self.url.partition('://')[2]}", time.monotonic()
        self._wanted, self._unwanted = asyncio.Event(), asyncio.Event()
        self._wanted.set()

    @property
    def version(self) -> int:
        """Version that the server has confirmed; -1 while it is lost."""
        return self._server.confirmed

    @property
    def is_lost(self) -> bool:
        """Whether the server was lost and has not confirmed the newest weights since."""
        return self._lost_at is not None

    @property
    def is_asleep(self) -> bool:
        return self.state is LaneState.ASLEEP

    def set_wanted(self, is_wanted: bool) -> None:
        """Says whether a lent server is to serve or sleep. If it already sleeps, reports again that it does."""
        if self.is_asleep and not is_wanted:
            self._listeners.on_asleep(self.url)
        (self._wanted if is_wanted else self._unwanted).set()
        (self._unwanted if is_wanted else self._wanted).clear()

    async def run(self) -> None:
        while True:
            if self._wanted.is_set():
                await self._until_unwanted(self._serve())
            await self._fall_asleep()
            await self._wanted.wait()
            was_asleep = self.state is LaneState.ASLEEP
            self._take(LaneEvent.WANTED if was_asleep else LaneEvent.RETRY_DUE)

    async def _until_unwanted(self, serving: Coroutine[Any, Any, None]) -> None:
        """Runs ``serving`` until it ends, and cancels it as soon as the server is to sleep."""
        tasks = {asyncio.create_task(serving), asyncio.create_task(self._unwanted.wait())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # what ends the lane

    async def _fall_asleep(self) -> None:
        self._server.lose()
        if self.state is not LaneState.READY:
            await self._recover()
        try:
            await self._client.sleep()
        except _LOSSES as error:
            self._lose(error, "It is tried again when the server is wanted.")
            await self._recover()
            return
        self._take(LaneEvent.ASLEEP)
        self._listeners.on_asleep(self.url)

    async def _serve(self) -> None:
        while True:
            try:
                newer = await self._next_version()
                if newer is not None:
                    await self._bring(newer)
                elif self.state is LaneState.READY:
                    await self._check_idle()
            except _LOSSES as error:
                # The loss is reported first, because recovering may take as long as its timeouts.
                pause = self._backoff.seconds_after_failure()
                self._lose(error, f"The trainer tries again in {pause:g} s.")
                self._count_refusal(error)
                await self._recover()
                await asyncio.sleep(pause)
                self._take(LaneEvent.RETRY_DUE)

    def announce(self) -> None:
        """Reports again which version the server has confirmed."""
        if self.version >= 0:
            self._listeners.on_version(self.url, self.version, 0.0)

    async def close(self) -> None:
        self._keep_as_base(None)
        self._take(LaneEvent.REMOVED)
        await self._connection.close()
        await self._client.close()

    async def _next_version(self) -> int | None:
        """Waits for a version to push; ``None`` if there is none for ``_CHECK_SECONDS``."""
        if not self._is_held():
            newer = await self._versions.newer_than(self.version, _CHECK_SECONDS)
            return None if self._is_held() else newer
        deadline = time.monotonic() + _CHECK_SECONDS
        while self._is_held() and time.monotonic() < deadline:
            await asyncio.sleep(_HELD_SECONDS)
        return None

    def _is_held(self) -> bool:
        return self.held_from is not None and self.version >= self.held_from

    async def _bring(self, version: int) -> None:
        if self.state is LaneState.JOINING:
            await self._join()
            self._take(LaneEvent.JOINED)
            version = self._versions.newest  # a newer version may have been published meanwhile
        with self._versions.sending(version):
            if self.state is LaneState.READY:
                if not await self._prepare(version):
                    return
                self._take(LaneEvent.NEWER_VERSION)
            report = await self._push(version)
            self._take(LaneEvent.COMMITTED, version=version, bytes=report.num_bytes)
            spans.add(self._track, "pause", self._since - report.pause_seconds, self._since)
            await self._attest(version)
            self._keep_as_base(version)
        self._confirm(report)

    async def _join(self) -> None:
        if self._is_lent:
            # If it were broken off, nobody would know whether the server holds memory.
            await in_full(self._client.wake())
        if not self._is_joined:
            await self._connection.join()
            await self._attestation.observe()
            self._is_joined = True

    async def _recover(self) -> None:
        self._is_joined = False
        await self._connection.recover()

    async def _prepare(self, version: int) -> bool:
        """Prepares a version. If that fails, waits before the next attempt and returns False."""
        try:
            await self._connection.prepare(version)
        except NotPrepared as error:
            self.is_blocked, self.last_error = True, str(error)
            logger.warning("%s continues with version %d: %s", self.url, self.version, error)
            self._listeners.on_change()
            await asyncio.sleep(self._backoff.seconds_after_failure())
            return False
        self.is_blocked = False
        return True

    async def _push(self, version: int) -> PushReport:
        base = self._server.base
        timeout_seconds = self._sync.push_timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                if base is None:
                    return await self._connection.push(version, None)
                with self._versions.sending(base):
                    return await self._connection.push(version, base)
        except TimeoutError as error:
            if str(error):  # a timeout within the push has its own message
                raise
            raise TimeoutError(
                f"{self.url} must take version {version} within weight_sync.push_timeout_seconds "
                f"= {timeout_seconds:g}, but the push has not ended. Check the server's log, or "
                "raise the setting."
            ) from error

    async def _attest(self, version: int) -> None:
        await self._check_version(version)
        try:
            self.num_attested += await self._attestation.check(version)
        except AttestationFailed as error:
            raise VersionMismatch(f"{self.url}, version {version}: {error}") from error

    async def _check_idle(self) -> None:
        if self._client.capabilities.stops_for != "nothing":
            # A server that was stopped may meanwhile have received a pause request that was cancelled.
            await self._client.resume()
        await self._check_version(self.version)
        # The dispatcher may have marked the server as lost for other reasons.
        self.announce()

    async def _check_version(self, version: int) -> None:
        served = await self._client.version()
        if served != version:
            raise VersionMismatch(
                f"{self.url} must serve version {version}, but it reports {served}. Either "
                "the server was restarted, or another trainer updates it."
            )

    def _confirm(self, report: PushReport) -> None:
        self.num_pushes += 1
        self._num_refusals = None
        self._server.confirmed, self.last_push = report.version, report
        self._backoff.reset()
        if self._lost_at is not None:
            seconds, self._lost_at = time.monotonic() - self._lost_at, None
            logger.warning("%s has joined again, %.0f s after it was lost.", self.url, seconds)
        self._listeners.on_version(self.url, report.version, report.pause_seconds)
        self._take(LaneEvent.ATTESTED, version=report.version)
        logger.info(
            "%s serves version %d: %.1f MB in %.3f s (%.2f GB/s), paused for %.1f ms.",
            self.url, report.version, report.num_bytes / 1e6, report.push_seconds,
            report.gb_per_second, 1e3 * report.pause_seconds,
        )  # fmt: skip

    def _lose(self, error: BaseException, what_follows: str) -> None:
        reason = str(error) or type(error).__name__
        if self._lost_at is None:
            self._lost_at, self._reminders = time.monotonic(), Reminders()
            logger.warning(
                "Lost %s while %s: %s %s", self.url, self.state.value, reason, what_follows
            )
        else:
            # A server may be gone for days, so the same reason is not logged at each attempt.
            seconds = time.monotonic() - self._lost_at
            if self._reminders.is_due(seconds) or reason != self.last_error:
                logger.warning(
                    "%s has not joined again for %.0f s: %s %s",
                    self.url, seconds, reason, what_follows,
                )  # fmt: skip
        self.num_failures += 1
        self.is_blocked, self.last_error = False, reason
        self._server.lose()
        self._listeners.on_lost(self.url, reason)
        is_mismatch = isinstance(error, VersionMismatch)
        self._take(LaneEvent.VERSION_MISMATCH if is_mismatch else LaneEvent.FAILED)

    def _count_refusal(self, error: BaseException) -> None:
        """Counts refusals in a row. Raises WeightsRefused after too many, so that no run asks forever."""
        if self._num_refusals is None or isinstance(error, VersionMismatch):
            return
        is_refusal = isinstance(error, ServerError) and error.was_answered
        self._num_refusals = self._num_refusals + 1 if is_refusal else 0
        if self._num_refusals == _MAX_REFUSALS:
            raise WeightsRefused(
                f"The server {self.url} must take the weights of this run, but it has refused "
                f"them {_MAX_REFUSALS} times and has never taken any. The last reason: {error} "
                "If that does not say what to change, start the server with the model of "
                "model.hf_assets_path (scripts/serve_vllm.sh, scripts/serve_sglang.sh)."
            ) from error

    def _keep_as_base(self, version: int | None) -> None:
        """If deltas are in use, lets the next push send only what has changed since ``version``."""
        if self._sync.delta and self._client.capabilities.takes_deltas:
            self._server.keep_as_base(version)

    def _take(self, event: LaneEvent, **facts: Any) -> None:
        name = "push" if self.state is LaneState.SYNCING else self.state.value
        begin, self._since = self._since, time.monotonic()
        spans.add(self._track, name, begin, self._since, **facts)
        self.state = next_state(self.state, event)
        self._listeners.on_change()
