# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides when the trainer's devices are lent to servers, and when they are taken back.

This module only computes, without asyncio and without a clock. *Lent* servers share the devices of
the training ranks, and *other* servers have their own. A lending takes this course::

    NO --LEND--> WAKING ------> AWAKE --TAKE_BACK--> SLEEPING --> NO
                    room, wake                         sleep

``room`` is the time in which the ranks free memory. Later they need as long again to take it back.
``wake`` is the time until the lent servers serve the newest weights. ``sleep`` is the time in which
their requests are cut, to continue elsewhere or later, and in which they free their memory. A *round
trip* is room + wake + sleep. A lending is *late* from when the batch is full until the devices are back.

What is saved: ``m`` groups of the next batch are missing. The other servers finish ``r`` groups per
second, and the lent ones ``l``. Without lending, the batch is full in ``m / r`` seconds. With lending,
it is full in ``round trip + (m - r * round trip) / (r + l)``, since the other servers never stop. A
lent server cannot speed up a group that another server runs. Of the groups that no server runs, the
other servers start ``r * (room + wake)`` before the lent ones are awake, and the lent ones can take
at most what is left. If the lent servers can do more than the batch lacks, they begin later batches,
and each group of these shortens a later wait by ``1 / r`` seconds.

The rules:

- LEND if the trainer waits for a batch that is not full, and if lending saves more than the *debt*,
  after its own costs. Without other servers, always.
- TAKE_BACK if the batch is full, or if the lent servers can no longer help: nothing is left for them,
  they are lost, or the other servers alone fill the batch before the devices could be back. Without
  other servers, only if the batch is full.
- After TAKE_BACK, a second LEND for the same batch waits for a round trip, so that at most half of
  a wait is spent on switching.
- The debt is how long lending has delayed steps, minus the share ``max_late`` of the time of steps. A
  step is delayed while a lending is late and while the ranks take back memory. The time that the lent
  servers have saved is subtracted: ``n`` groups save ``n / r`` seconds. The debt may become negative, but
  not below minus one round trip.
- Times count as 0 until they are measured, and lent servers as being as fast as the others. So the
  devices are lent in the first wait, and everything is measured.
- Measured times may have changed. For each second of steps without lending, 0.005 s of the costs of
  lending are forgotten. If the next try costs as much as before, it has cost 0.5 % of that time.

These invariants follow:

- Devices are never lent while the trainer trains or has a full batch, never lent twice, and never
  lent only to be taken back at once.
- The first decision on a full batch with lent devices is TAKE_BACK.
- Without other servers every batch becomes full: each wait begins with LEND, and ends with a full batch.
- A decision depends on the moment and on what was observed, not on how often it was asked for, and
  not on the unit of time: there is no fixed threshold in seconds.
- More missing work for lent servers, or lower costs of lending, never turn a LEND into a refusal.
- If there are other servers, lending delays any span of steps by at most ``max_late`` of its time,
  plus a round trip, plus the largest saving that was ever expected, plus the longest delay.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

from torchtitan.grpo.rollout.fading_mean import FadingMean

# The last five lendings count for two thirds.
_FADE = 0.8
_FORGOTTEN_SHARE = 0.005


class Lent(Enum):
    """The state of lending. In NO, the trainer has its devices, and in AWAKE, lent servers use them."""

    NO = "no"
    WAKING = "waking"
    AWAKE = "awake"
    SLEEPING = "sleeping"


class Decision(Enum):
    STAY = "stay"
    LEND = "lend"
    TAKE_BACK = "take back"


@dataclass(frozen=True)
class Moment:
    """The facts at one moment that a decision depends on. Times are in seconds on one clock.

    Attributes:
        asked_at: When the trainer asked for the batch, or part, that it waits for; ``None`` while
            it trains.
        is_full: Whether the batch could be taken now, if the devices were back.
        missing_groups: Unfinished groups that the batch waits for.
        movable_groups: Those of the missing groups that a lent server runs or could run, because no
            other server runs them. 0 if they wait only for the staleness bound or for scoring.
        later_groups: Groups of later batches that a lent server could run, within the staleness bound.
        since: When the state ``lent`` began.
        other_rate: Groups per second that the usable other servers finish if they have enough to
            do; 0 if there are none, ``None`` if they are not measured yet.
        lent_rate: The same for the lent servers while they are awake, computed as tokens divided by a
            group's mean tokens, because few groups begin and end in one lending. 0 if no lent server
            could serve even with the devices.
    """

    now: float
    asked_at: float | None
    is_full: bool
    missing_groups: int
    movable_groups: int
    lent: Lent
    since: float
    other_rate: float | None
    lent_rate: float | None
    later_groups: int = 0


MAX_LATE = 0.05
"""Share of the time of training steps by which lending may delay them."""


class LendScheduler:
    """Decides by measured times. Lending may delay steps by the share ``max_late`` of their time."""

    def __init__(self, max_late: float = MAX_LATE) -> None:
        self._max_late = max_late
        self._room, self._wake, self._sleep = (FadingMean(_FADE) for _ in range(3))
        self._debt = 0.0  # negative: of the share is so much left
        self._forgotten = 0.0
        self._given_up: float | None = None  # seconds for room in this step

    def observe_room(self, seconds: float) -> None:
        """Records the time from LEND until the devices are free, even if they are taken back at once."""
        self._room.add(seconds)
        self._given_up = (self._given_up or 0.0) + seconds

    def observe_wake(self, seconds: float) -> None:
        """Records the time from free devices until all lent servers serve, or are told to stop waking."""
        self._wake.add(seconds)

    def observe_sleep(self, seconds: float) -> None:
        """Records the time from TAKE_BACK in the state AWAKE until no lent server holds the devices."""
        self._sleep.add(seconds)

    def observe_step(
        self, step_seconds: float, late_seconds: float, lent_groups: float, other_rate: float | None
    ) -> None:
        """Notes that a batch, or part of one, was delivered, ``step_seconds`` after the one before.

        ``lent_groups`` is the work of the lent servers since the previous one, computed as tokens
        divided by a group's mean tokens.
        """
        if self._given_up is None:
            delay = 0.0
            self._forgotten += _FORGOTTEN_SHARE * step_seconds
        else:
            saved = lent_groups / other_rate if other_rate else math.inf
            delay = max(0.0, late_seconds + self._given_up - saved)
            self._forgotten, self._given_up = 0.0, None
        self._debt = max(self._debt + delay - self._max_late * step_seconds, -self._round_trip)

    @property
    def _round_trip(self) -> float:
        return self._room.value + self._wake.value + self._sleep.value

    def decide(self, moment: Moment) -> Decision:
        if moment.lent is Lent.NO:
            return Decision.LEND if self._should_begin(moment) else Decision.STAY
        if moment.lent is Lent.SLEEPING or not self._should_end(moment):
            return Decision.STAY
        return Decision.TAKE_BACK

    def _should_begin(self, moment: Moment) -> bool:
        waking = replace(moment, lent=Lent.WAKING, since=moment.now)
        if moment.lent_rate == 0 or self._should_end(waking):
            return False
        was_lent = moment.asked_at is not None and moment.since >= moment.asked_at
        if was_lent and moment.now - moment.since < self._round_trip:
            return False
        return self.saving(moment) > max(0.0, self._debt)

    def _should_end(self, moment: Moment) -> bool:
        if moment.asked_at is None or moment.is_full:
            return True
        if moment.other_rate == 0:
            return False
        if moment.movable_groups + moment.later_groups == 0 or moment.lent_rate == 0:
            return True
        if moment.other_rate is None:
            return False
        # Nothing changes before the next group is finished, by which half a group may be decided
        # too late.
        seconds = self._seconds_back(moment) + 1 / (moment.other_rate + _lent_rate(moment))
        return moment.missing_groups <= moment.other_rate * seconds

    def _seconds_back(self, moment: Moment) -> float:
        """Returns the seconds until the devices can be back. Servers that are waking finish waking first."""
        waking = 0.0
        if moment.lent is Lent.WAKING:
            elapsed = moment.now - moment.since
            waking = max(0.0, self._room.value + self._wake.value - elapsed)
        return max(0.0, waking + self._sleep.value - self._forgotten)

    def saving(self, moment: Moment) -> float:
        """Seconds by which this step and later ones begin earlier if the devices are lent now."""
        rate = moment.other_rate
        if not rate:
            return math.inf
        missing, movable = moment.missing_groups, moment.movable_groups
        seconds = self._seconds_with_lending(missing, movable, rate, _lent_rate(moment))
        later = self._later_groups(moment, rate, seconds - self._room.value) / rate
        return missing / rate - seconds + later + self._forgotten

    def _later_groups(self, moment: Moment, other_rate: float, seconds: float) -> float:
        """Returns the groups that lent servers add to later batches if this batch is full in ``seconds``."""
        of_batch = max(0.0, moment.missing_groups - other_rate * seconds)
        done = _lent_rate(moment) * max(0.0, seconds - self._round_trip)
        left = moment.movable_groups + moment.later_groups
        left -= other_rate * (self._room.value + self._wake.value)
        return max(0.0, min(done, left) - of_batch)

    def _seconds_with_lending(
        self, missing: float, movable: float, other_rate: float, lent_rate: float
    ) -> float:
        """Returns the seconds until the step can begin, if the devices are lent now."""
        shared = (missing - other_rate * self._round_trip) / (other_rate + lent_rate)
        left = max(0.0, movable - other_rate * (self._room.value + self._wake.value))
        others = (missing - min(left, missing)) / other_rate
        return max(self._round_trip + max(0.0, shared), others) + self._room.value

    def bound(
        self,
        train_seconds: float,
        groups_per_batch: int,
        other_rate: float,
        lent_rate: float,
        *,
        is_ahead: bool,
    ) -> float:
        """Returns the largest factor by which lending can raise samples per second, at constant rates.

        ``is_ahead``: whether the other servers also generate while the trainer trains
        (``rollout.max_head_offpolicyness`` above 0).
        """
        if other_rate == 0:
            return math.inf

        def missing(busy_seconds: float) -> float:
            done = other_rate * busy_seconds if is_ahead else 0.0
            return max(0.0, groups_per_batch - done)

        without = missing(train_seconds) / other_rate
        left = missing(train_seconds + self._room.value)
        lending = self._seconds_with_lending(left, left, other_rate, lent_rate)
        return (train_seconds + without) / (train_seconds + min(without, lending))


def _lent_rate(moment: Moment) -> float:
    rate = moment.lent_rate if moment.lent_rate is not None else moment.other_rate
    assert rate is not None, "the rates are known"
    return rate
