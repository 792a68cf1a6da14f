# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates a run whose training devices are lent, as the run's own scheduler decides.

Unlike in a run, the scheduler is told the true rates of the servers instead of measured ones.
"""

from collections.abc import Sequence

from torchtitan.grpo.commands.forecast.servers import SimulatedServer
from torchtitan.grpo.commands.forecast.simulation import Simulation
from torchtitan.grpo.commands.forecast.system import System
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment


class LendingSimulation(Simulation):
    """A simulation that asks the scheduler before each event whether to lend or to take back devices."""

    def __init__(self, system: System, seed: int) -> None:
        super().__init__(system, seed)
        self.lent = Lent.NO
        self._scheduler = LendScheduler()
        self._since, self._began_at, self._full_at = 0.0, 0.0, 0.0
        self._step_at, self._step_tokens, self._late_seconds = 0.0, 0.0, 0.0
        self._lent = [server for server in self.servers if server.is_lent]
        self._others = [server for server in self.servers if not server.is_lent]
        self._group_tokens = system.mean_tokens * system.grpo.group_size
        self._lent_rate, self._other_rate = self._rate(self._lent), self._rate(self._others)

    def look(self) -> None:
        if self.lent is Lent.NO and self.asked_at is None:
            return
        decision, costs = self._scheduler.decide(self._moment()), self.system.costs
        if decision is Decision.LEND:
            self._began_at = self.now
            self._become(Lent.WAKING)
            self._scheduler.observe_room(costs.room)
            self.at(self.now + costs.room + costs.wake, self._woken, self._since)
        elif decision is Decision.TAKE_BACK:
            self._cut()
            self._become(Lent.SLEEPING)
            self.at(self.now + costs.sleep, self._asleep)

    def deliver(self) -> None:
        self._full_at = self.now
        if self.lent is Lent.NO:
            self.train()

    def observe_step(self) -> None:
        tokens = sum(server.tokens for server in self._lent)
        groups = (tokens - self._step_tokens) / self._group_tokens
        seconds = self.now - self._step_at
        self._scheduler.observe_step(seconds, self._late_seconds, groups, self._other_rate)
        self._step_at, self._step_tokens, self._late_seconds = self.now, tokens, 0.0

    def _become(self, lent: Lent) -> None:
        self.lent, self._since = lent, self.now

    def _woken(self, since: float) -> None:
        if self.lent is not Lent.WAKING or since != self._since:
            return  # the devices were taken back meanwhile
        self._scheduler.observe_wake(self.system.costs.wake)
        self._become(Lent.AWAKE)
        self.served = self.version
        for server in self._lent:
            server.is_awake, server.version = True, self.version
        self.start_groups()

    def _cut(self) -> None:
        """Interrupts lent servers. Other servers continue their requests, or the same ones once awake again."""
        for server in self._lent:
            server.advance(self.now)
            self.homeless += server.cut()
            self.plan(server)
            server.is_awake = False
        self.start_groups()

    def _asleep(self) -> None:
        self._scheduler.observe_sleep(self.system.costs.sleep)
        self._become(Lent.NO)
        self.totals["lent"] += self.now - self._began_at
        if self.pending:  # states that are copied back do not delay its forward pass
            self._late_seconds += self.now - self._full_at
            self.train()

    def _rate(self, servers: Sequence[SimulatedServer]) -> float:
        return sum(server.tokens_per_second() for server in servers) / self._group_tokens

    def _moment(self) -> Moment:
        missing, movable, later = 0, 0, 0
        if self.asked_at is not None and not self.pending:
            missing = max(1, self.admission.num_missing)
            free = {i for i, g in self.groups.items() if g.left > 0 and not g.is_elsewhere}
            movable, later = self.admission.lendable(free, self.version, self.in_flight)
        return Moment(
            now=self.now,
            asked_at=self.asked_at,
            is_full=bool(self.pending),
            missing_groups=missing,
            movable_groups=movable,
            lent=self.lent,
            since=self._since,
            other_rate=self._other_rate,
            lent_rate=self._lent_rate,
            later_groups=later,
        )
