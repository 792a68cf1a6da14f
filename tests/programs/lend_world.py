# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A trainer, other servers and lent servers in virtual time, which obey a `LendScheduler`."""

import math
import random
from dataclasses import dataclass, field

from torchtitan.grpo.rollout.fading_mean import FadingMean
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment

TICK = 0.1


@dataclass(frozen=True)
class Plan:
    """Times are means in seconds; ``noise`` is the largest relative deviation of costs and steps."""

    seed: int = 0
    groups_per_batch: int = 8
    staleness: int = 0
    in_order: bool = False  # each batch consists of the groups that were started for it
    other_slots: tuple[int, ...] = (2,)  # groups that each of the servers generates at a time
    lent_slots: int = 2
    lent_speed: float = 1.0  # which the scheduler is not told
    group_seconds: float = 4.0
    spread: float = 0.0  # of the logarithm of a group's work
    train_seconds: float = 4.0
    room: float = 0.1
    wake: float = 0.5
    sleep: float = 0.3
    first_wake_factor: float = 1.0
    noise: float = 0.0
    loss_seconds: float = 0.0  # mean time between losses of a server; 0 for none


@dataclass
class Group:
    number: int
    left: float  # seconds of work


@dataclass
class Server:
    slots: int
    is_lent: bool = False
    running: list[Group] = field(default_factory=list)
    down_until: float = 0.0


class World:
    """Advances by ticks. ``scheduler`` is ``None`` in a run without lending."""

    def __init__(self, plan: Plan, scheduler: LendScheduler | None) -> None:
        self.plan, self.scheduler = plan, scheduler
        self.now = 0.0
        self.num_taken = self.num_trained = self.num_started = 0  # the first is of batches
        self.finished: set[int] = set()
        self.waiting: list[Group] = []  # cut groups
        self.servers = [Server(slots) for slots in plan.other_slots]
        self.servers.append(Server(plan.lent_slots, is_lent=True))
        self.asked_at: float | None = 0.0
        self.full_at: float | None = None
        self.trained_at, self.step_began = 0.0, 0.0
        self.lent, self.since = Lent.NO, -1.0
        self.awake_at = self.back_at = 0.0
        self.num_wakes, self.was_lent, self.lent_work = 0, False, 0.0
        self.room_given = 0.0
        self.mean_work = FadingMean(0.98)
        self.num_finished = 0
        self.rng = random.Random(plan.seed)  # costs and losses
        self.late: list[float] = []
        self.delays: list[float] = []
        self.steps: list[float] = []

    # What the scheduler is told.

    def moment(self) -> Moment:
        missing, movable = self._missing()
        return Moment(
            now=self.now,
            asked_at=self.asked_at,
            is_full=missing == 0,
            missing_groups=missing,
            movable_groups=movable,
            lent=self.lent,
            since=self.since,
            other_rate=self._rate(is_lent=False),
            lent_rate=self._rate(is_lent=True),
            later_groups=max(0, self._lendable() - movable),
        )

    def _missing(self) -> tuple[int, int]:
        """The missing and the movable groups of the next batch."""
        plan, first = self.plan, self.num_taken * self.plan.groups_per_batch
        elsewhere = {g.number for s in self.servers if not s.is_lent for g in s.running}
        if plan.in_order:
            batch = set(range(first, first + plan.groups_per_batch))
            return len(batch - self.finished), len(batch - self.finished - elsewhere)
        missing = max(0, plan.groups_per_batch - len(self.finished))
        return missing, min(missing, self._lendable())

    def _lendable(self) -> int:
        on_lent = sum(len(s.running) for s in self.servers if s.is_lent)
        return self._limit() - self.num_started + len(self.waiting) + on_lent

    def _rate(self, is_lent: bool) -> float | None:
        servers = [s for s in self.servers if s.is_lent == is_lent and s.down_until <= self.now]
        if not any(s.slots for s in servers):
            return 0.0
        if self.num_finished == 0 or (is_lent and self.num_wakes == 0):
            return None
        return sum(s.slots for s in servers) / self.mean_work.value

    def _limit(self) -> int:
        return (self.num_trained + self.plan.staleness + 1) * self.plan.groups_per_batch

    # What happens.

    def advance(self) -> Decision:
        self.now += TICK
        self._lose_servers()
        self._train()
        self._generate()
        self._move_devices()
        moment = self.moment()
        if self.asked_at is not None and moment.is_full and self.full_at is None:
            self.full_at = self.now
        decision = self.scheduler.decide(moment) if self.scheduler else Decision.STAY
        self._obey(decision)
        if self.asked_at is not None and moment.is_full and self.lent is Lent.NO:
            self._take_batch()
        return decision

    def _lose_servers(self) -> None:
        for server in self.servers if self.plan.loss_seconds else ():
            is_up = server.down_until <= self.now
            if is_up and self.rng.random() < TICK / self.plan.loss_seconds:
                server.down_until = self.now + self.rng.uniform(1.0, 30.0)
                self._cut(server)

    def _cut(self, server: Server) -> None:
        self.waiting = sorted(self.waiting + server.running, key=lambda group: group.number)
        server.running = []

    def _train(self) -> None:
        if self.asked_at is None and self.now >= self.trained_at:
            self.num_trained += 1
            self.asked_at = self.now

    def _generate(self) -> None:
        for server in self.servers:
            can = self.lent is Lent.AWAKE if server.is_lent else True
            if not can or server.down_until > self.now:
                continue
            speed = self.plan.lent_speed if server.is_lent else 1.0
            for group in server.running:
                group.left -= TICK * speed
            for group in [g for g in server.running if g.left < TICK / 2]:
                server.running.remove(group)
                self.finished.add(group.number)
                self.num_finished += 1
                self.mean_work.add(self._work(group.number))
            if server.is_lent:
                self.lent_work += TICK * speed * len(server.running)
        self._start_groups()

    def _start_groups(self) -> None:
        # In turn, as a server is chosen that has the least work.
        usable = [s for s in self.servers if s.down_until <= self.now]
        usable = [s for s in usable if not s.is_lent or self.lent is Lent.AWAKE]
        while usable:
            server = max(usable, key=lambda s: s.slots - len(s.running))
            if len(server.running) >= server.slots:
                return
            if self.waiting:
                server.running.append(self.waiting.pop(0))
            elif self.num_started < self._limit():
                server.running.append(Group(self.num_started, self._work(self.num_started)))
                self.num_started += 1
            else:
                return

    def _work(self, number: int) -> float:
        """The same in every run of the plan."""
        rng, spread = random.Random(f"{self.plan.seed} {number}"), self.plan.spread
        return self.plan.group_seconds * rng.lognormvariate(-(spread**2) / 2, spread)

    def _cost(self, mean: float) -> float:
        return mean * self.rng.uniform(1 - self.plan.noise, 1 + self.plan.noise)

    def _obey(self, decision: Decision) -> None:
        plan = self.plan
        if decision is Decision.LEND:
            room, wake = self._cost(plan.room), self._cost(plan.wake)
            wake *= plan.first_wake_factor if self.num_wakes == 0 else 1.0
            self.free_at, self.awake_at = self.now + room, self.now + room + wake
            self.lent_at = self.now
            self._go(Lent.WAKING)
            self.was_lent = True
        elif decision is Decision.TAKE_BACK:
            self.is_early = self.lent is Lent.WAKING and self.now < self.free_at
            # A server that has begun to wake cannot be stopped.
            begin = self.awake_at if self.lent is Lent.WAKING else self.now
            self.back_at = self.free_at if self.is_early else begin + self._cost(plan.sleep)
            self.sleep_began = begin
            for server in self.servers:
                if server.is_lent:
                    self._cut(server)
            self._go(Lent.SLEEPING)

    def _move_devices(self) -> None:
        assert self.scheduler or self.lent is Lent.NO
        if self.lent is Lent.WAKING and self.now >= self.awake_at:
            self._observe_wake()
            self._go(Lent.AWAKE)
        elif self.lent is Lent.SLEEPING and self.now >= self.back_at:
            if self.is_early:
                self._observe_room()
            else:
                if self.sleep_began == self.awake_at:
                    self._observe_wake()
                self.scheduler.observe_sleep(self.back_at - self.sleep_began)
            self._go(Lent.NO)

    def _observe_wake(self) -> None:
        self.num_wakes += 1
        self._observe_room()
        self.scheduler.observe_wake(self.awake_at - self.free_at)

    def _observe_room(self) -> None:
        self.room_given += self.free_at - self.lent_at
        self.scheduler.observe_room(self.free_at - self.lent_at)

    def _go(self, lent: Lent) -> None:
        self.lent, self.since = lent, self.now

    def _take_batch(self) -> None:
        plan, step = self.plan, self.now - self.step_began
        late = self.now - self.full_at if self.was_lent else 0.0
        rate = self._rate(is_lent=False)
        lent_groups = self.lent_work / self.mean_work.value
        self.late.append(late)
        saved = lent_groups / rate if rate else math.inf
        self.delays.append(max(0.0, late + self.room_given - saved))
        self.steps.append(step)
        if self.scheduler:
            self.scheduler.observe_step(step, late, lent_groups, rate)
        first = self.num_taken * plan.groups_per_batch
        batch = sorted(self.finished)[: plan.groups_per_batch]
        assert not plan.in_order or batch == list(range(first, first + plan.groups_per_batch))
        self.finished -= set(batch)
        self.num_taken += 1
        rng = random.Random(f"{plan.seed} train {self.num_taken}")
        train = plan.train_seconds * rng.uniform(1 - plan.noise, 1 + plan.noise)
        self.trained_at = self.now + train + self.room_given
        self.step_began, self.asked_at, self.full_at = self.now, None, None
        self.was_lent, self.lent_work, self.room_given = False, 0.0, 0.0

    def run(self, num_batches: int, limit_seconds: float = 1e5) -> float:
        """Returns the seconds until so many batches are taken."""
        while self.num_taken < num_batches:
            assert self.now < limit_seconds, f"deadlock: {self.moment()}"
            self.advance()
        return self.now
