# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lends the training devices to servers and takes them back, as the scheduler decides.

A lent server serves in the state AWAKE of `scheduler.py`. Rank 0 has a task for each server, its lane
(`weight_sync/lane.py`), which pushes weights to it, puts it to sleep and wakes it. The list of servers
that rank 0 gets says which ones are wanted. The lender runs in the rollout process's event loop, next to
the producer, with these states:

    NO        a batch is wanted, and lending pays: rank 0 is asked for the devices
    WAKING    the devices are free, the servers are wanted, and their lanes push and attest
    AWAKE     all lent servers serve, or have ended
    SLEEPING  their requests are cut, they are no longer wanted, and a server that does not sleep
              within ``inference.sleep_timeout_seconds`` is killed

A complete batch is sent to rank 0 only in the state NO.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.lending.rates import Rates
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment
from torchtitan.grpo.rollout.link_messages import DevicesWanted
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import RolloutGroup

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


class LentServers(Protocol):
    """The part of `ServerFleet` that the lender uses."""

    @property
    def lent(self) -> Collection[str]:
        """URLs of the servers on the training devices."""
        ...

    async def set_wanted(self, is_wanted: bool) -> None:
        """Reports to rank 0 whether lent servers are to serve or to sleep."""
        ...

    def is_up(self, url: str) -> bool:
        """Whether the process of a lent server runs and has finished starting."""
        ...

    async def end(self, url: str) -> bool:
        """Ends the process of a lent server. It is started again when it is wanted.

        Returns whether the server was up.
        """
        ...


@dataclass
class _Totals:
    """Totals since the last batch was delivered."""

    lent_seconds: float = 0.0
    late_seconds: float = 0.0
    wake_seconds: float = 0.0
    sleep_seconds: float = 0.0
    wakes: int = 0
    kills: int = 0
    cut_requests: int = 0


class DeviceRequests:
    """Keeps track of whether the training devices are free. All calls must be in one event loop.

    Lent servers may use the devices from rank 0's notice until the batch that rank 0 waits for is
    delivered, before which they must sleep. ``listeners`` are called when the devices become free.
    """

    def __init__(
        self, send: Callable[[DevicesWanted], Awaitable[None]], start_version: int
    ) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._send = send
        self._begun = start_version - 1  # the newest version whose batch was delivered
        self._wanted: int | None = None
        self._free: int | None = None

    @property
    def are_free(self) -> bool:
        return self._free is not None

    async def want(self, version: int) -> None:
        """Asks rank 0, once for each ``version``, to free the devices while it waits for that batch."""
        if version not in (self._wanted, self._free):
            self._wanted = version
            await self._send(DevicesWanted(version))

    def free(self, version: int) -> None:
        """Handles rank 0's notice of free devices. Ignored if the batch of ``version`` was delivered."""
        if version > self._begun:
            self._free = version
            for listener in self.listeners:
                listener()

    def deliver(self, version: int) -> None:
        """Ends the loan. Called just before a batch is sent."""
        self._begun, self._wanted, self._free = version, None, None


class Lender:
    """Lends the training devices to servers, as the module's docstring describes.

    ``generating`` returns the ids of groups with unfinished completions. ``sleep_seconds`` is the
    time within which a server must fall asleep.
    """

    def __init__(
        self,
        scheduler: LendScheduler,
        admission: Admission,
        dispatcher: Dispatcher,
        servers: LentServers,
        devices: DeviceRequests,
        generating: Callable[[], Set[int]],
        *,
        sleep_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._admission = scheduler, admission
        self._dispatcher, self._servers, self._devices = dispatcher, servers, devices
        self._generating = generating
        self._sleep_seconds, self._clock = sleep_seconds, clock
        self._rates = Rates(dispatcher, lambda: servers.lent)
        # Servers are launched awake, on devices that are free until the first batch.
        self.lent, self._since = Lent.WAKING, clock()
        self._asked_at: float | None = None
        self._full_at: float | None = None
        self._delivered_at = clock()
        self._version = 0
        self._free_at: float | None = clock()  # since then the lent servers are wanted
        self._has_woken = False
        self._asleep: set[str] = set()
        self._refusing: dict[str, str] = {}  # with their reasons
        self._lost_at: dict[str, float] = {}  # when a lane has last failed to reach a server
        self._failed_at: dict[str, float] = {}  # of servers that are wanted and lost
        self._news, self._are_back = asyncio.Event(), asyncio.Event()
        self._totals = _Totals()
        for source in (dispatcher, devices):
            source.listeners.append(self._news.set)

    # -- news --------------------------------------------------------------------------

    def note_version(self, url: str, version: int, pause_seconds: float = 0.0) -> None:
        """Handles a lane's notice that it attested a version. Ignored if the server must sleep by now."""
        if url not in self._servers.lent or self.lent in (Lent.WAKING, Lent.AWAKE):
            self._dispatcher.set_version(url, version, pause_seconds)

    def note_asleep(self, url: str) -> None:
        """Handles a lane's notice that its server sleeps. Ignored if the server is wanted by now."""
        if self.lent not in (Lent.WAKING, Lent.AWAKE):
            self._asleep.add(url)
            self._dispatcher.set_asleep(url)

    def note_lost(self, url: str, reason: str) -> None:
        """Handles a lane's notice that its server is lost or does not sleep. Tell the dispatcher first."""
        self._refusing[url], self._lost_at[url] = reason, self._clock()

    def ask(self, version: int) -> None:
        """Notes that rank 0 waits for the batch of ``version``."""
        self._version, self._asked_at = version, self._clock()
        self._news.set()

    async def give_back(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Takes back the devices for a complete batch. Returns metrics once no lent server uses the devices.

        The caller must send the batch next, because the devices then already count as the trainer's.
        """
        self._full_at = self._clock()
        self._news.set()
        await self._are_back.wait()
        now = self._clock()
        totals, self._totals = self._totals, _Totals()
        totals.late_seconds = now - self._full_at
        step_seconds, self._delivered_at = now - self._delivered_at, now
        self._asked_at = self._full_at = None
        self._devices.deliver(self._version)
        lent_groups, lent_fraction = self._rates.take_step(_tokens_per_group(groups))
        self._scheduler.observe_step(
            step_seconds, totals.late_seconds, lent_groups, self._rates.other
        )
        return _metrics(totals, lent_fraction)

    # -- the loop ----------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await wait_at_most(_LOOK_SECONDS, self._news)
            self._news.clear()
            await self._act()

    async def _act(self) -> None:
        self._note_tokens(are_awake=self.lent is Lent.AWAKE)
        if self.lent is Lent.NO and self._devices.are_free and self._asked_at is None:
            self._enter(Lent.WAKING)  # rank 0 trains no more
            await self._want_servers()
        elif self.lent is Lent.WAKING:
            await self._continue_waking()
        if self.lent in (Lent.WAKING, Lent.AWAKE):
            await self._replace_failed()
        if self._asked_at is None and self._full_at is None:
            return
        decision = self._scheduler.decide(self._moment())
        if decision is Decision.LEND:
            self._enter(Lent.WAKING)
            await self._devices.want(self._version)
        elif decision is Decision.TAKE_BACK:
            await self._take_back()

    async def _continue_waking(self) -> None:
        if self._free_at is not None:
            self._become_awake(self._free_at)
        elif self._devices.are_free:
            self._scheduler.observe_room(self._clock() - self._since)
            if self._full_at is None:
                await self._want_servers()

    async def _want_servers(self) -> None:
        self._free_at, self._has_woken = self._clock(), True
        self._totals.wakes += 1
        for url in self._servers.lent:
            self._dispatcher.admit(url)
        await self._servers.set_wanted(True)

    def _become_awake(self, free_at: float) -> None:
        servers = self._lent_servers()
        waking = (s for s in servers if not (s.is_ready() or s.is_down or s.has_failed))
        if any(s.is_ready() for s in servers) and not any(waking):
            self._note_wake(self._clock() - free_at)
            self._enter(Lent.AWAKE)

    def _note_wake(self, seconds: float) -> None:
        if self._has_woken:  # what came before is the trainer's start
            self._scheduler.observe_wake(seconds)
            self._totals.wake_seconds += seconds

    async def _take_back(self) -> None:
        if self._free_at is None:  # nobody has been woken yet
            if not self._devices.are_free:  # the ranks make room all the same
                self._scheduler.observe_room(self._clock() - self._since)
            self._enter(Lent.NO)
            return
        was_awake = self.lent is Lent.AWAKE
        if not was_awake:
            self._note_wake(self._clock() - self._free_at)
        self._free_at = None
        self._enter(Lent.SLEEPING)
        cut_before = self._dispatcher.num_cut
        await asyncio.gather(*(self._dispatcher.cut(s.url) for s in self._lent_servers()))
        self._totals.cut_requests += self._dispatcher.num_cut - cut_before
        self._note_tokens(are_awake=was_awake)
        self._asleep.clear()
        self._refusing.clear()  # what was lost before may fall asleep
        await self._servers.set_wanted(False)
        await self._until_asleep(self._clock() + self._sleep_seconds)
        seconds = self._clock() - self._since
        if was_awake:
            self._scheduler.observe_sleep(seconds)
        self._totals.sleep_seconds += seconds
        self._enter(Lent.NO)

    async def _until_asleep(self, deadline: float) -> None:
        late = f"not within inference.sleep_timeout_seconds = {self._sleep_seconds:g}."
        while awake := [s for s in self._lent_servers() if not self._has_freed(s)]:
            self._news.clear()  # first, so that no news is lost while a server is ended
            for server in awake:
                if server.url in self._refusing or self._clock() > deadline:
                    reason = self._refusing.get(server.url, late)
                    await self._end(server.url, "did not fall asleep", reason)
                    self._asleep.add(server.url)
                    self._news.set()
            await wait_at_most(_LOOK_SECONDS, self._news)

    def _has_freed(self, server: Server) -> bool:
        return server.url in self._asleep or server.is_down

    async def _replace_failed(self) -> None:
        """Ends servers that are wanted but stay lost, so that they are started again.

        A push of weights may take longer than the time limit, so a server is ended only when a push
        fails after the limit.
        """
        now, failed = self._clock(), {}
        for server in self._lent_servers():
            url = server.url
            if not (server.has_failed and self._servers.is_up(url)):
                continue
            failed[url] = self._failed_at.get(url, now)
            if self._lost_at.get(url, 0.0) - failed[url] > self._sleep_seconds:
                await self._end(
                    url, f"has been lost for inference.sleep_timeout_seconds = {self._sleep_seconds:g}",
                    self._refusing.get(url, ""),
                )  # fmt: skip
        self._failed_at = failed

    async def _end(self, url: str, problem: str, reason: str) -> None:
        if await self._servers.end(url):
            self._totals.kills += 1
            logger.error(
                "The lent server %s was ended, because it %s: %s Training goes on. The server is started "
                "again while devices are lent.", url, problem, reason,
            )  # fmt: skip

    def _note_tokens(self, *, are_awake: bool) -> None:
        is_asked = self._asked_at is not None and self._full_at is None
        self._rates.note(self._clock(), is_asked=is_asked, are_awake=are_awake)

    def _lent_servers(self) -> list[Server]:
        servers = self._dispatcher.servers
        return [servers[url] for url in self._servers.lent if url in servers]

    def _moment(self) -> Moment:
        free = self._generating() - self._rates.elsewhere()
        movable, later = self._admission.lendable(free, self._version, self._dispatcher.in_flight)
        return Moment(
            now=self._clock(),
            asked_at=self._asked_at,
            is_full=self._full_at is not None,
            missing_groups=self._admission.num_missing,
            movable_groups=movable,
            later_groups=later,
            lent=self.lent,
            since=self._since,
            other_rate=self._rates.other,
            lent_rate=self._rates.lent,
        )

    def _enter(self, lent: Lent) -> None:
        now = self._clock()
        if self.lent is Lent.AWAKE:
            self._totals.lent_seconds += now - self._since
        if self.lent is not Lent.NO:
            spans.add("lending", self.lent.value, self._since, now)
        self.lent, self._since = lent, now
        (self._are_back.set if lent is Lent.NO else self._are_back.clear)()


def _tokens_per_group(groups: Sequence[RolloutGroup]) -> float:
    lengths = (len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    return sum(lengths) / len(groups)


def _metrics(totals: _Totals, lent_fraction: float) -> dict[str, float]:
    return {
        "lend/lent_seconds": totals.lent_seconds,
        "lend/late_seconds": totals.late_seconds,
        "wait/lend_seconds": totals.late_seconds,
        "lend/wake_seconds": totals.wake_seconds,
        "lend/sleep_seconds": totals.sleep_seconds,
        "lend/wakes": float(totals.wakes),
        "lend/kills": float(totals.kills),
        "lend/cut_requests": float(totals.cut_requests),
        "lend/tokens_fraction": lent_fraction,
    }
