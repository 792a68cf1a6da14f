# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lends the training devices of a simulated run, as the run's own scheduler decides.

Unlike in a run, the scheduler is told the true rates of the servers instead of measured ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchtitan.grpo.plan.servers import Completion, SimulatedServer
from torchtitan.grpo.plan.system import System
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment


class Run(Protocol):
    """What lending needs of a simulated run (``simulation.py``)."""

    system: System
    servers: list[SimulatedServer]
    homeless: list[Completion]
    pending: list[int]
    totals: Counter[str]
    now: float
    asked_at: float | None
    version: int
    mean_tokens: float

    def at(self, time: float, handle: Callable[..., None], *arguments: Any) -> None: ...
    def start_groups(self) -> None: ...
    def plan(self, server: SimulatedServer) -> None: ...
    def train(self) -> None: ...
    def num_missing(self) -> int: ...


class Lender:
    """Looks after each event. What it does takes the times of the simulated system's costs."""

    def __init__(self, run: Run) -> None:
        self.lent = Lent.NO
        self._run, self._scheduler = run, LendScheduler(run.system.max_late)
        self._since, self._began_at = 0.0, 0.0
        self._full_at: float | None = None
        self._step_at, self._late_seconds, self._step_tokens = 0.0, 0.0, 0.0
        self._servers = [server for server in run.servers if server.is_lent]
        self._others = [server for server in run.servers if not server.is_lent]

    def look(self) -> None:
        run = self._run
        if run.pending and self._full_at is None:
            self._full_at = run.now
        decision = self._scheduler.decide(self._moment())
        costs = run.system.costs
        if decision is Decision.LEND:
            self._began_at = run.now
            self._become(Lent.WAKING)
            self._scheduler.observe_room(costs.room)
            run.at(run.now + costs.room + costs.wake, self._woken, self._since)
        elif decision is Decision.TAKE_BACK:
            self._cut()
            self._become(Lent.SLEEPING)
            run.at(run.now + costs.sleep, self._asleep)

    def _become(self, lent: Lent) -> None:
        self.lent, self._since = lent, self._run.now

    def _woken(self, since: float) -> None:
        if self.lent is not Lent.WAKING or since != self._since:
            return  # the devices were taken back meanwhile
        self._scheduler.observe_wake(self._run.system.costs.wake)
        self._become(Lent.AWAKE)
        for server in self._servers:
            server.is_awake, server.version = True, self._run.version
        self._run.start_groups()

    def _cut(self) -> None:
        """The requests go on at other servers, or when these are awake again."""
        for server in self._servers:
            server.advance(self._run.now)
            self._run.homeless += server.cut(server.runs())
            self._run.plan(server)
            server.is_awake = False
        self._run.start_groups()

    def _asleep(self) -> None:
        run, room = self._run, self._run.system.costs.room
        self._scheduler.observe_sleep(run.system.costs.sleep)
        self._become(Lent.NO)
        back = run.now + room
        run.totals["lent"] += back - self._began_at
        if run.pending:
            self._late_seconds += back - (self._full_at or run.now)
            run.at(back, run.train)
        self._full_at = None

    def observe_step(self) -> None:
        run = self._run
        tokens = sum(server.tokens for server in self._servers)
        groups = (tokens - self._step_tokens) / self._group_tokens()
        seconds = run.now - self._step_at
        self._scheduler.observe_step(seconds, self._late_seconds, groups, self._rate(self._others))
        self._step_at, self._step_tokens, self._late_seconds = run.now, tokens, 0.0

    def _group_tokens(self) -> float:
        return self._run.mean_tokens * self._run.system.grpo.group_size

    def _rate(self, servers: Sequence[SimulatedServer]) -> float:
        return sum(server.tokens_per_second() for server in servers) / self._group_tokens()

    def _moment(self) -> Moment:
        run = self._run
        missing, movable = 0, 0
        if run.asked_at is not None and not run.pending:
            missing = max(1, run.num_missing())
            held = set[int]().union(*(server.runs() for server in self._others))
            movable = max(0, missing - len(held))
        return Moment(
            now=run.now,
            asked_at=run.asked_at,
            is_full=bool(run.pending),
            missing_groups=missing,
            movable_groups=movable,
            lent=self.lent,
            since=self._since,
            other_rate=self._rate(self._others),
            lent_rate=self._rate(self._servers),
        )
