# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One server's pushes, through the states of `lane_state.py`.

The newest version wins: a lane that is done takes what is newest then, not what came next.
A lane waits for its own server alone, each time with a bound, so a slow, stopped or dead
server delays nobody else. A lost server gets no work until it has been joined anew and has
confirmed the newest weights.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.weight_sync.connection import Connection, PushReport
from torchtitan.grpo.weight_sync.disk_versions import VersionNotWritten
from torchtitan.grpo.weight_sync.lane_state import Backoff, LaneEvent, LaneState, next_state
from torchtitan.grpo.weight_sync.probe import Probes, compare, is_attested
from torchtitan.grpo.weight_sync.versions import Versions

logger = logging.getLogger(__name__)

# How often an idle lane asks whether the server still serves what was pushed: one that was
# restarted answers, with other weights.
_CHECK_SECONDS = 5.0
_LOSSES = (ServerError, OSError, TimeoutError, RuntimeError)
"""What a push may fail with on account of the server; RuntimeError covers torch's own."""


class VersionMismatch(ServerError):
    """The server does not serve what was pushed to it."""


@dataclass(frozen=True)
class Attestation:
    """What a server must prove after a push, besides its own word about its version.

    Attributes:
        every: Versions divisible by it are attested by log-probabilities; 0 is none.
        tokens: That are rated.
        probes: What the trainer expects.
        tolerance: Largest mean difference.
        timeout_seconds: How long the trainer may take to say what it expects, and a server
            to say what it gives.
    """

    every: int
    tokens: list[int]
    probes: Probes
    tolerance: float
    timeout_seconds: float

    def concerns(self, version: int) -> bool:
        """Whether ``version`` is attested so."""
        return is_attested(version, self.every)


@dataclass(frozen=True)
class LaneSettings:
    """What all lanes share.

    Attributes:
        push_timeout_seconds: ``weight_sync.push_timeout_seconds``.
        retry_seconds: ``weight_sync.retry_seconds``.
        max_retry_seconds: ``weight_sync.max_retry_seconds``.
        delta: ``weight_sync.delta``.
        attestation: See there.
    """

    push_timeout_seconds: float
    retry_seconds: float
    max_retry_seconds: float
    delta: bool
    attestation: Attestation


@dataclass(frozen=True)
class Listeners:
    """Who is told of a lane's changes.

    Attributes:
        on_change: After each change of what is public in a lane.
        on_version: (url, version) when the server has confirmed a version.
        on_lost: (url, reason) when it is lost.
    """

    on_change: Callable[[], None]
    on_version: Callable[[str, int], None]
    on_lost: Callable[[str, str], None]


class Lane:
    """See the module's docstring.

    Args:
        connection: The server.
        versions: What there is to send.
        settings: Of all lanes.
        listeners: Of all lanes.

    Attributes:
        state: Where the lane is.
        version: What the server has confirmed; -1 before that, and while it is lost.
        num_pushes: Confirmed pushes.
        num_attested: Of those, attested by log-probabilities.
        num_failures: How often the server was lost.
        is_blocked: What is newest could not be written on our side; the server goes on with less.
        last_error: Of the last loss, or of the last version that could not be sent.
        last_push: Of the last confirmed push.
    """

    def __init__(
        self,
        connection: Connection,
        versions: Versions,
        settings: LaneSettings,
        listeners: Listeners,
    ) -> None:
        self.url = connection.client.url
        self.state = LaneState.JOINING
        self.version = -1
        self.num_pushes = self.num_attested = self.num_failures = 0
        self.is_blocked = False
        self.last_error = ""
        self.last_push: PushReport | None = None
        self._connection, self._client = connection, connection.client
        self._versions, self._settings, self._listeners = versions, settings, listeners
        self._backoff = Backoff(settings.retry_seconds, settings.max_retry_seconds)
        self._base: int | None = None

    @property
    def is_lost(self) -> bool:
        """From a loss until the newest weights are confirmed, attempts to rejoin included."""
        return self.num_failures > 0 and self.version < 0

    async def run(self) -> None:
        """Serves the lane until it is cancelled."""
        while True:
            try:
                newer = await self._versions.newer_than(self.version, _CHECK_SECONDS)
                if newer is not None:
                    await self._bring(newer)
                elif self.state is LaneState.READY:
                    await self._check_idle()
            except _LOSSES as error:
                # Told first, since clearing up may take as long as the server lets it.
                self._lose(error)
                await self._connection.recover()
                await asyncio.sleep(self._backoff.seconds_after_failure())
                self._take(LaneEvent.RETRY_DUE)

    def announce(self) -> None:
        """Says again what the server has confirmed."""
        if self.version >= 0:
            self._listeners.on_version(self.url, self.version)

    async def close(self) -> None:
        """Leaves the server's groups and closes the client."""
        self._keep_as_base(None)
        self._take(LaneEvent.REMOVED)
        await self._connection.close()
        await self._client.close()

    async def _bring(self, version: int) -> None:
        """One version, from the join if need be to the attestation."""
        if self.state is LaneState.JOINING:
            await self._connection.join()
            self._take(LaneEvent.JOINED)
            version = self._versions.newest  # joining may have taken long
        with self._versions.sending(version):
            if self.state is LaneState.READY:
                if not await self._prepare(version):
                    return
                self._take(LaneEvent.NEWER_VERSION)
            report = await self._push(version)
            self._take(LaneEvent.COMMITTED)
            await self._attest(version)
            self._keep_as_base(version)
        self._confirm(report)

    async def _prepare(self, version: int) -> bool:
        """Whether our side is ready; if not, waits a little: the server goes on with what it has."""
        try:
            await self._connection.prepare(version)
        except VersionNotWritten as error:
            self.is_blocked, self.last_error = True, str(error)
            logger.warning("%s goes on with version %d: %s", self.url, self.version, error)
            self._listeners.on_change()
            await asyncio.sleep(self._backoff.seconds_after_failure())
            return False
        self.is_blocked = False
        return True

    async def _push(self, version: int) -> PushReport:
        base = self._base if self._base is not None and self._versions.has(self._base) else None
        timeout_seconds = self._settings.push_timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                if base is None:
                    return await self._connection.push(version, None)
                with self._versions.sending(base):
                    return await self._connection.push(version, base)
        except TimeoutError as error:
            if str(error):  # a bound within the push, which says so itself
                raise
            raise TimeoutError(
                f"{self.url} did not take version {version} within weight_sync.push_timeout_seconds "
                f"= {timeout_seconds:g} (from disk: weight_sync.timeout_seconds)."
            ) from error

    async def _attest(self, version: int) -> None:
        await self._check_version(version)
        attestation = self._settings.attestation
        if not attestation.concerns(version):
            return
        try:
            expected = await attestation.probes.wait_for(version, attestation.timeout_seconds)
        except TimeoutError as error:
            # No fault of the server's: it goes on, as with versions that are not attested so.
            logger.warning("%s serves version %d, by its own word: %s", self.url, version, error)
            return
        if expected is None:
            return  # the trainer is far ahead: a newer version is on its way
        served = await self._rated(version)
        try:
            compare(expected, served, attestation.tolerance)
        except ServerError as error:
            raise VersionMismatch(f"{self.url}, version {version}: {error}") from error
        self.num_attested += 1

    async def _rated(self, version: int) -> list[float]:
        """The probe tokens' log-probabilities, which wait their turn among what is written."""
        attestation = self._settings.attestation
        try:
            async with asyncio.timeout(attestation.timeout_seconds):
                return await self._client.prompt_logprobs(attestation.tokens)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.url} did not rate the probe tokens under version {version} within "
                f"weight_sync.timeout_seconds = {attestation.timeout_seconds:g}: it has too much "
                "to write, or has stopped."
            ) from error

    async def _check_idle(self) -> None:
        if self._client.stops_for != "nothing":
            # A pause that was given up on a stopped server may have reached it since.
            await self._client.resume()
        await self._check_version(self.version)
        # The dispatcher may have lost it on its own account.
        self.announce()

    async def _check_version(self, version: int) -> None:
        served = await self._client.version()
        if served != version:
            raise VersionMismatch(
                f"{self.url} must serve version {version}, it says {served}: it was "
                "restarted, or somebody else updates it."
            )

    def _confirm(self, report: PushReport) -> None:
        self.num_pushes += 1
        self.version, self.last_push = report.version, report
        self._backoff.reset()
        self._listeners.on_version(self.url, report.version)
        self._take(LaneEvent.ATTESTED)
        logger.info(
            "%s serves version %d: %.1f MB in %.3f s (%.2f GB/s), paused for %.1f ms.",
            self.url, report.version, report.num_bytes / 1e6, report.push_seconds,
            report.num_bytes / 1e9 / max(report.transfer_seconds, 1e-9),
            1e3 * report.pause_seconds,
        )  # fmt: skip

    def _lose(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        self.num_failures += 1
        self.is_blocked, self.last_error = False, reason
        self.version = -1
        self._keep_as_base(None)
        logger.warning("Lost %s while %s: %s", self.url, self.state.value, reason)
        self._listeners.on_lost(self.url, reason)
        is_mismatch = isinstance(error, VersionMismatch)
        self._take(LaneEvent.VERSION_MISMATCH if is_mismatch else LaneEvent.FAILED)

    def _keep_as_base(self, version: int | None) -> None:
        """The next push may send what has changed since ``version``."""
        if not (self._settings.delta and self._client.takes_deltas):
            return
        if version is not None:
            self._versions.want_base(version)
        if self._base is not None:
            self._versions.release_base(self._base)
        self._base = version

    def _take(self, event: LaneEvent) -> None:
        self.state = next_state(self.state, event)
        self._listeners.on_change()
