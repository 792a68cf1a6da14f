# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every interleaving of training, copy and gather threads around the snapshot slots.

The decisions are those of the real :class:`Slots`; the threads around them are modeled:

    training   [leader: reserve] -> fence, optimizer step -> copy_into -> [leader: filled]
    copy       start -> finish, one copy at a time, in order
    gather     leader: take_newest, command -> all ranks: read, start -> finish -> barrier
               -> leader: hold where it can, else release
    lanes      read what is held, until the leader drops it at any time: release

Followers learn of a slot to fill, and of a slot to read, arbitrarily late. A version without
anything to learn from has neither a fence nor an optimizer step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from torchtitan.grpo.weight_sync.slots import Slots, SlotState

NOTHING, MIXTURE = -1, -2


class ViolationError(AssertionError):
    """An invariant does not hold; the message tells the steps that led there."""


def explore(
    initial: Any,
    steps: Callable[[Any], Iterable[tuple[str, Any]]],
    *,
    is_goal: Callable[[Any], bool],
) -> int:
    """Visits every state that can be reached, breadth first; returns their number.

    ``steps`` yields all that may happen next, with the state afterwards, and raises what is wrong
    with a state. From every state a goal must be within reach without any step that begins with
    ``fault``. Raises ViolationError with the shortest way to what is wrong.
    """
    # States are known by their number: to hash one takes longer than all else.
    states, numbers = [initial], {initial: 0}
    came_from: list[tuple[int, str] | None] = [None]
    leads_back: dict[int, list[int]] = {}
    number = 0
    while number < len(states):
        try:
            for what, following in steps(states[number]):
                next_number = numbers.setdefault(following, len(states))
                if next_number == len(states):
                    states.append(following)
                    came_from.append((number, what))
                if not what.startswith("fault"):
                    leads_back.setdefault(next_number, []).append(number)
        except (AssertionError, ValueError) as error:
            way = _way_to(number, came_from)
            raise ViolationError(f"{error}, after{way}\nat {states[number]}") from error
        number += 1
    safe = _that_reach([n for n, state in enumerate(states) if is_goal(state)], leads_back)
    for number, state in enumerate(states):
        if number not in safe:
            way = _way_to(number, came_from)
            raise ViolationError(f"stuck: no goal is in reach, after{way}\nat {state}")
    return len(states)


def _that_reach(goals: list[int], leads_back: dict[int, list[int]]) -> set[int]:
    found, waiting = set(goals), list(goals)
    while waiting:
        for former in leads_back.get(waiting.pop(), ()):
            if former not in found:
                found.add(former)
                waiting.append(former)
    return found


def _way_to(number: int, came_from: list[tuple[int, str] | None]) -> str:
    way = []
    step = came_from[number]
    while step is not None:
        way.append(step[1])
        step = came_from[step[0]]
    return "".join(f"\n  {what}" for what in reversed(way))


class Rank(NamedTuple):
    """One rank's threads and slots. Weights are told apart by the number of their step."""

    version: int = 0  # being made by the training thread
    at: str = "reserve"  # what the training thread does next
    weights: int = 0
    decisions: tuple[int, ...] = ()  # slots to fill, not looked at yet
    slot: int = 0  # that the training thread fills next
    copies: tuple[tuple[int, int], ...] = ()  # (slot, version), the first one is next
    is_copying: bool = False
    contents: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()  # versions of the slots, as the gather thread sees them
    command: tuple[int, int] = (NOTHING, NOTHING)  # (slot, version) to read
    will_hold: bool = False  # the slot, once all have read it; the leader's decision
    reader: str = "idle"


class System(NamedTuple):
    table: Slots
    ranks: tuple[Rank, ...]
    sent: int = NOTHING
    held: tuple[tuple[int, int], ...] = ()  # (slot, version) that lanes send


@dataclass(frozen=True)
class Model:
    num_slots: int
    num_ranks: int  # the first is the leader
    last_version: int  # versions are 0 to this one
    empty_versions: frozenset[int] = frozenset({0})  # those without an optimizer step
    max_held: int = 0  # slots beyond num_slots for versions that are sent from them
    # The trainer makes no new version while the one that was sent last is more than this behind,
    # as when it waits for rollouts.
    max_lag: int | None = None
    bug: str = ""  # what is wrong on purpose

    def initial(self) -> System:
        table = (_BROKEN_TABLES.get(self.bug) or Slots).free(self.num_slots, self.max_held)
        nothing = (NOTHING,) * (self.num_slots + self.max_held)
        return System(table, (Rank(contents=nothing, labels=nothing),) * self.num_ranks)

    def weights_of(self, version: int) -> int:
        return sum(v not in self.empty_versions for v in range(version + 1))

    def is_done(self, system: System) -> bool:
        return system.sent == self.last_version and all(
            r.reader == "idle" and not r.copies and r.version > self.last_version
            for r in system.ranks
        )

    def steps(self, system: System) -> Iterator[tuple[str, System]]:
        for rank in range(self.num_ranks):
            for what, following in self._training(system, rank):
                yield f"rank {rank} training: {what}", following
            for what, following in self._copying(system, rank):
                yield f"rank {rank} copy: {what}", following
            for what, following in self._gathering(system, rank):
                yield f"rank {rank} gather: {what}", following
        yield from self._dropping(system)

    # -- training thread ---------------------------------------------------------------

    def _training(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        if me.version > self.last_version:
            return
        if me.at == "reserve":
            yield from self._reserve(system, rank)
        elif me.at == "optimizer":
            yield from self._optimizer(system, rank)
        elif me.at == "copy_into":
            copies = (*me.copies, (me.slot, me.version))
            after = me._replace(at="filled", copies=copies)
            yield f"copy_into({me.slot})", _with(system, rank, after)
        else:
            labels = _replaced(me.labels, me.slot, me.version)
            after = me._replace(at="reserve", version=me.version + 1, labels=labels)
            after_all = _with(system, rank, after)
            if rank == 0:
                after_all = after_all._replace(table=system.table.filled(me.slot, me.version))
            yield f"filled({me.slot}, {me.version})", after_all

    def _reserve(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        if rank > 0:
            if me.decisions:
                after = me._replace(
                    at="optimizer", slot=me.decisions[0], decisions=me.decisions[1:]
                )
                yield f"is told slot {after.slot}", _with(system, rank, after)
            return
        if self.max_lag is not None and system.sent < me.version - 1 - self.max_lag:
            return
        if self.bug == "skips" and SlotState.FREE not in system.table.states:
            table, slot = system.table, NOTHING
        else:
            table, slot = system.table.reserve()
        ranks = [r._replace(decisions=(*r.decisions, slot)) for r in system.ranks[1:]]
        first = me._replace(at="optimizer", slot=slot)
        yield f"reserve() = {slot}", system._replace(table=table, ranks=(first, *ranks))

    def _optimizer(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        if me.slot == NOTHING:  # left out, as only a bug can make it
            after = me._replace(at="reserve", version=me.version + 1)
        else:
            after = me._replace(at="copy_into")
        if me.version in self.empty_versions:
            yield "nothing to learn", _with(system, rank, after)
        elif not me.copies or self.bug == "no fence":
            assert not me.is_copying, "parameters are overwritten while they are copied"
            after = after._replace(weights=self.weights_of(me.version))
            yield "fence, optimizer step", _with(system, rank, after)

    # -- copy thread -------------------------------------------------------------------

    def _copying(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        if not me.copies:
            return
        slot, version = me.copies[0]
        if me.is_copying:
            contents = _replaced(me.contents, slot, me.weights)
            after = me._replace(is_copying=False, copies=me.copies[1:], contents=contents)
            yield f"finish slot {slot}", _with(system, rank, after)
            return
        reads = me.reader == "reading" and me.command[0] == slot
        assert not reads, f"slot {slot} is written while it is read"
        # A rank that lags may still fill it with versions up to the one that is referenced.
        refers = system.table.states[slot] is SlotState.SENDING
        assert not refers or version <= system.table.versions[slot], (
            f"slot {slot} is overwritten while it is referenced"
        )
        assert slot not in dict(system.held), f"slot {slot} is written while it is held"
        contents = _replaced(me.contents, slot, MIXTURE)
        after = me._replace(is_copying=True, contents=contents)
        yield f"start slot {slot}", _with(system, rank, after)

    # -- gather thread -----------------------------------------------------------------

    def _gathering(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        if rank == 0 and me.reader == "idle":
            yield from self._take(system)
        elif me.reader == "asked":
            yield from self._start_reading(system, rank)
        elif me.reader == "reading":
            self._check_contents(me)
            after = _with(system, rank, me._replace(reader="barrier"))
            if self.bug == "release before the barrier" and rank == 0:
                after = after._replace(table=system.table.release(me.command[0]))
            yield "read, finish", after
        elif rank == 0 and all(r.reader == "barrier" for r in system.ranks):
            yield self._barrier(system)

    def _take(self, system: System) -> Iterator[tuple[str, System]]:
        taken = system.table.take_newest()
        if taken is None or any(r.reader != "idle" for r in system.ranks):
            return
        table, slot = taken
        version = table.versions[slot]
        assert version > system.sent, f"version {version} is sent after {system.sent}"
        ranks = [
            r._replace(reader="asked", command=(slot, version), will_hold=table.can_hold())
            for r in system.ranks
        ]
        yield f"take_newest() = {slot, version}", system._replace(table=table, ranks=tuple(ranks))

    def _start_reading(self, system: System, rank: int) -> Iterator[tuple[str, System]]:
        me = system.ranks[rank]
        slot, version = me.command
        if me.labels[slot] != version and self.bug != "no look at the label":
            return
        if any(s == slot for s, _ in me.copies) and self.bug != "no wait for the copy":
            return
        me = me._replace(reader="reading")
        self._check_contents(me)
        yield "read, start", _with(system, rank, me)

    def _check_contents(self, me: Rank) -> None:
        slot, version = me.command
        assert me.contents[slot] == self.weights_of(version), (
            f"a reader of version {version} finds {me.contents[slot]} in slot {slot}"
        )

    def _barrier(self, system: System) -> tuple[str, System]:
        slot, version = system.ranks[0].command
        table, held = system.table, system.held
        if system.ranks[0].will_hold and self.bug != "release before the barrier":
            table, held = table.hold(slot), (*held, (slot, version))
            if self.bug == "releases what is held":
                table = table.release(slot)
        elif self.bug != "release before the barrier":
            table = table.release(slot)
        ranks = tuple(r._replace(reader="idle", command=(NOTHING, NOTHING)) for r in system.ranks)
        return f"{table.states[slot].value} {slot}", System(table, ranks, version, held)

    # -- lanes -------------------------------------------------------------------------

    def _dropping(self, system: System) -> Iterator[tuple[str, System]]:
        for slot, version in system.held:
            for me in system.ranks:
                assert me.contents[slot] == self.weights_of(version), (
                    f"a lane is sent {me.contents[slot]} as version {version}"
                )
            held = tuple(other for other in system.held if other != (slot, version))
            table = system.table
            if self.bug != "releases what is held":
                table = table.release(slot)
            yield f"drop {version}", system._replace(table=table, held=held)


def _with(system: System, rank: int, me: Rank) -> System:
    return system._replace(ranks=(*system.ranks[:rank], me, *system.ranks[rank + 1 :]))


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class ReservesWhatIsSent(Slots):
    def reserve(self):
        sending = self._in_state(SlotState.SENDING)
        if sending:
            return self._with(sending[0], SlotState.RESERVED), sending[0]
        return super().reserve()

    def release(self, slot):
        return self if self.states[slot] is not SlotState.SENDING else super().release(slot)


class KeepsOlderOnes(Slots):
    def take_newest(self):
        waiting = self._in_state(SlotState.PENDING)
        if not waiting:
            return None
        slot = max(waiting, key=lambda s: self.versions[s])
        return self._with(slot, SlotState.SENDING), slot


_BROKEN_TABLES: dict[str, type[Slots]] = {
    "reserves what is sent": ReservesWhatIsSent,
    "keeps older ones": KeepsOlderOnes,
}


_SYSTEMS = [
    Model(num_slots=3, num_ranks=1, last_version=5),
    Model(num_slots=2, num_ranks=2, last_version=3),
    pytest.param(Model(num_slots=2, num_ranks=2, last_version=4), marks=pytest.mark.long),
    Model(num_slots=3, num_ranks=2, last_version=3),
    Model(num_slots=2, num_ranks=2, last_version=3, empty_versions=frozenset({0, 2})),
    Model(num_slots=2, num_ranks=2, last_version=4, max_lag=0),
    Model(num_slots=2, num_ranks=2, last_version=4, max_lag=1),
    Model(num_slots=2, num_ranks=1, last_version=5, max_held=2),
    Model(num_slots=2, num_ranks=2, last_version=3, max_held=1),
    Model(num_slots=2, num_ranks=2, last_version=3, max_held=2, max_lag=1),
]


@pytest.mark.parametrize("model", _SYSTEMS, ids=str)
def test_no_interleaving_breaks_an_invariant_or_gets_stuck(model):
    assert explore(model.initial(), model.steps, is_goal=model.is_done) > 500


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("no fence", "parameters are overwritten while they are copied|a reader of version"),
        ("reserves what is sent", "is written while it is read"),
        ("release before the barrier", "is overwritten while it is referenced|is written while"),
        ("no wait for the copy", "a reader of version"),
        ("no look at the label", "a reader of version"),
        ("keeps older ones", "is sent after"),
        ("skips", "no goal is in reach"),
        ("releases what is held", "is written while it is held"),
    ],
)
def test_the_exploration_finds_what_is_broken_on_purpose(bug, message):
    num_slots = 3 if bug == "keeps older ones" else 2
    max_held = 1 if bug == "releases what is held" else 0
    model = Model(num_slots, num_ranks=2, last_version=3, max_held=max_held, bug=bug)
    with pytest.raises(AssertionError, match=message):
        explore(model.initial(), model.steps, is_goal=model.is_done)
