# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Improves a table of actions for given times, within a bound on memory.

Forward-backward improvement (https://doi.org/10.1016/0377-2217(92)90046-Y) packs a table to the
left, where each rank runs the first action that can run now or soon, then to the right with time
reversed, and repeats. Packing left closes gaps in the warm-up, packing right in the cool-down.
An action may overtake others only if the rank's memory stays within the bound.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table

_ROUND = 1e-9
"""Times and memories that differ by less count as equal, because float sums are inexact."""

Orders = list[list[int]]
"""For each rank, its actions by number."""


def improve(
    tables: Iterable[Table], costs: Costs, max_memory: float = math.inf, rounds: int = 4
) -> Table:
    """Returns the improved table with the shortest makespan and, among equals, the shortest span.

    ``max_memory`` bounds each rank's memory. If all tables exceed the bound, the result is the one that
    exceeds it least.
    """
    best: tuple[tuple[float, float, float], Table] | None = None
    for table in tables:
        work = Work.of(table, costs)
        for orders in work.candidates(table, max_memory, rounds):
            excess = max(0.0, work.peak(orders) - max_memory - _ROUND)
            score = (excess, *work.makespan_and_span(orders))
            if best is None or score < best[0]:
                named = tuple(tuple(work.actions[i] for i in order) for order in orders)
                best = score, replace(table, actions=named)
    assert best is not None, "there must be at least one table to improve"
    return best[1]


def _output_layer(action: Action, table: Table) -> Iterator[tuple[Action, ...]]:
    """Yields what must precede an action so that the last stage holds one microbatch's logits at a time.

    There, a microbatch's backward pass must precede the next microbatch's forward pass. Of several
    models, only the first has logits.
    """
    stage, kind, microbatch = action
    if kind == "F" and stage == table.gap_stages[-1] and microbatch > 0:
        yield Action(stage, "I", microbatch - 1), Action(stage, "B", microbatch - 1)


def _as_listed(action: Action) -> int:
    return 0


def _weights_last(action: Action) -> int:
    return action.kind == "W"


_PREFERENCES: tuple[Callable[[Action], int], ...] = (_as_listed, _weights_last)
"""Functions that rank the actions that can run: the lowest number, 0 or more, runs first."""

_PATIENCES = (0.0, 0.5)
"""Times that a rank waits for a better action instead of running another, in average actions.

Without waiting, a rank can just miss an action from another rank and begin a long one, which
delays every rank that needs the missed one: with slow hops, and microbatches of unequal size.
"""


@dataclass
class Work:
    """The numbered actions of a table; lists have an entry for each action.

    ``changes`` are changes of memory. Actions of equal ``kinds`` run in the order of microbatches.
    ``before`` lists the actions that an action waits for, and ``after`` those that wait for it,
    each with the time of a hop between them.
    """

    actions: list[Action]
    ranks: list[int]
    times: list[float]
    changes: list[float]
    kinds: list[int]
    before: list[list[tuple[int, float]]]
    after: list[list[tuple[int, float]]]
    num_ranks: int

    @classmethod
    def of(cls, table: Table, costs: Costs) -> "Work":
        actions = [action for actions in table.actions for action in actions]
        numbers = {action: number for number, action in enumerate(actions)}
        before: list[list[tuple[int, float]]] = [[] for _ in actions]
        after: list[list[tuple[int, float]]] = [[] for _ in actions]
        for number, action in enumerate(actions):
            for alternatives in (*action.after(table), *_output_layer(action, table)):
                other = next(numbers[a] for a in alternatives if a in numbers)
                travels = table.ranks[alternatives[0].stage] != table.ranks[action.stage]
                hop = costs.hop if travels else 0.0
                before[number].append((other, hop))
                after[other].append((number, hop))
        return cls(
            actions,
            ranks=[table.ranks[action.stage] for action in actions],
            times=[costs.time(action) for action in actions],
            changes=[costs.memory(action) for action in actions],
            kinds=[4 * action.stage + "FIWB".index(action.kind) for action in actions],
            before=before,
            after=after,
            num_ranks=table.num_ranks,
        )

    def candidates(self, table: Table, max_memory: float, rounds: int) -> Iterator[Orders]:
        """Yields the orders of the table, and then those that packing produces from them."""
        numbers = {action: number for number, action in enumerate(self.actions)}
        given = [[numbers[action] for action in actions] for actions in table.actions]
        yield given
        reverse = replace(
            self, changes=[-c for c in self.changes], before=self.after, after=self.before
        )
        mean_time = sum(self.times) / len(self.times)
        for prefer, patience in itertools.product(_PREFERENCES, _PATIENCES):
            patience *= mean_time
            orders = _Packer(self, given, max_memory, prefer, patience).pack()
            yield orders
            for _ in range(rounds):
                ends = self.ends(orders)
                latest_first = [sorted(o, key=lambda i: -ends[i]) for o in orders]
                again = (max_memory, _as_listed, patience)
                to_right = [o[::-1] for o in _Packer(reverse, latest_first, *again).pack()]
                to_left = _Packer(self, to_right, *again).pack()
                yield to_right
                yield to_left
                if to_left == orders:
                    break  # further rounds would have the same result
                orders = to_left

    def ends(self, orders: Orders) -> list[float]:
        """Returns the time at which each action ends in these orders; inf if one waits forever."""
        ends, ready = [0.0] * len(self.actions), [0.0] * len(self.actions)
        waits_for = [len(before) for before in self.before]
        free_at, positions = [0.0] * self.num_ranks, [0] * self.num_ranks
        to_visit = list(range(self.num_ranks))
        while to_visit:
            rank = to_visit.pop()
            for number in orders[rank][positions[rank] :]:
                if waits_for[number]:
                    break
                end = max(ready[number], free_at[rank]) + self.times[number]
                ends[number] = free_at[rank] = end
                positions[rank] += 1
                for other, hop in self.after[number]:
                    waits_for[other] -= 1
                    ready[other] = max(ready[other], end + hop)
                    if self.ranks[other] != rank:
                        to_visit.append(self.ranks[other])
        return [math.inf] * len(ends) if any(waits_for) else ends

    def makespan_and_span(self, orders: Orders) -> tuple[float, float]:
        """Returns the whole table's duration, and the longest span of a rank, from first start to last end."""
        ends = self.ends(orders)
        spans = (ends[o[-1]] - ends[o[0]] + self.times[o[0]] for o in orders if o)
        return max(ends), max(spans)

    def peak(self, orders: Orders) -> float:
        held = (itertools.accumulate(self.changes[i] for i in order) for order in orders)
        return max(itertools.chain([0.0], *held))


class _Packer:
    """Makes orders in which a free rank runs an action that is ready, or will be within ``patience``.

    The orders deviate from ``orders`` where a rank would wait, or where ``prefer`` gives a later action
    a lower number. Only a rank's next action in ``orders`` may exceed ``max_memory``.
    """

    def __init__(
        self,
        work: Work,
        orders: Orders,
        max_memory: float,
        prefer: Callable[[Action], int],
        patience: float,
    ) -> None:
        self._work, self._max_memory = work, max_memory + _ROUND
        self._patience = patience + _ROUND
        self._preferences = [prefer(action) for action in work.actions]
        self._packed: Orders = [[] for _ in orders]
        self._visits = [(0.0, rank) for rank in range(work.num_ranks)]
        self._left = [list(order) for order in orders]
        self._num_kinds = [len({work.kinds[number] for number in order}) for order in orders]
        self._waits_for = [len(before) for before in work.before]
        self._ready = [0.0] * len(work.actions)
        self._free_at = [0.0] * work.num_ranks
        self._held = [0.0] * work.num_ranks

    def pack(self) -> Orders:
        while self._visits:
            self._visit(*heapq.heappop(self._visits))
        return self._packed

    def _visit(self, now: float, rank: int) -> None:
        """Lets a rank choose its next action, at a time when its choice may have changed."""
        if not self._left[rank] or self._free_at[rank] > now + _ROUND:
            return
        position, later = self._choose(now, rank)
        if position is not None:
            self._run(now, rank, self._left[rank].pop(position))
        elif later is not None:
            heapq.heappush(self._visits, (later, rank))

    def _choose(self, now: float, rank: int) -> tuple[int | None, float | None]:
        """Returns the position of the action to run, or the time at which to choose again."""
        work, held = self._work, self._held[rank]
        chosen: tuple[int, int] | None = None
        later: float | None = None
        peak, seen = held, set[int]()
        for position, number in enumerate(self._left[rank]):
            change = work.changes[number]
            if work.kinds[number] not in seen:
                seen.add(work.kinds[number])
                fits = position == 0 or change <= 0 or peak + change <= self._max_memory
                if fits and not self._waits_for[number]:
                    if self._ready[number] <= now + self._patience:
                        choice = self._preferences[number], position
                        chosen = choice if chosen is None else min(chosen, choice)
                        if choice[0] == 0:  # no later action is preferred to this one
                            break
                    elif later is None or self._ready[number] < later:
                        later = self._ready[number]
                if len(seen) == self._num_kinds[rank]:
                    break
            held += change
            peak = max(peak, held)
        if chosen is None:
            return None, later
        position = chosen[1]
        ready = self._ready[self._left[rank][position]]
        return (position, None) if ready <= now + _ROUND else (None, ready)

    def _run(self, now: float, rank: int, number: int) -> None:
        end = now + self._work.times[number]
        self._packed[rank].append(number)
        self._held[rank] += self._work.changes[number]
        self._free_at[rank] = end
        heapq.heappush(self._visits, (end, rank))
        for other, hop in self._work.after[number]:
            self._waits_for[other] -= 1
            self._ready[other] = max(self._ready[other], end + hop)
            holder = self._work.ranks[other]
            if holder != rank:
                heapq.heappush(self._visits, (max(end + hop, self._free_at[holder]), holder))
