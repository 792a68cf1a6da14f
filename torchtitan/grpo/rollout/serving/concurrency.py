# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Limits how many completions a server gets at once, without a clock and without asyncio.

The limit follows additive increase and multiplicative decrease (Chiu and Jain, 1989,
https://doi.org/10.1016/0169-7552(89)90019-6), as in TCP: it grows by one after each window of
completions without pressure, if it was fully used, and is halved under pressure. A burst of failures
halves it only once. There is no slow start, because each server begins with an equal quota of
``rollout.max_concurrent_rollouts``.
"""

from torchtitan.grpo.inference.client import ServerLoad

_FULL_KV = 0.9
_REPORTS_OF_PRESSURE = 2


class ConcurrencyWindow:
    """Bounds how many completions are in flight on one server.

    The state is ``size``, in completions, and::

        OPEN --pressure: size is halved--> SHUT --a completion begun since then ended--> OPEN

    In SHUT, ``size`` is not halved again: completions that began earlier say nothing about the new size.

    All completions of a group start at once, if fewer than ``size`` completions are in flight. Hence,
    with the group size as floor and ``rollout.max_concurrent_rollouts`` as ceiling::

        floor <= size <= ceiling
        new work never brings more than size + group_size - 1 completions in flight

    Pressure is a failed or overdue completion. It is also a report of a queue or of full
    memory, if the previous report showed one as well: a group that has just arrived waits
    briefly on any server. A queue shorter than a group is not pressure.
    """

    def __init__(self, *, floor: int, ceiling: int, quota: int) -> None:
        self.floor = min(floor, ceiling)
        self.ceiling = ceiling
        self.size = min(max(quota, self.floor), ceiling)
        self.num_cuts = 0
        self._num_begun = 0
        self._first_after_cut = 0
        self._num_good = 0
        self._num_reports_of_pressure = 0
        self._is_shut = False

    def offer(self, quota: int) -> None:
        """Enlarges a window that was never halved to ``quota``, for example after a server has left."""
        if self.num_cuts == 0:
            self.size = min(max(quota, self.size), self.ceiling)

    def begin(self) -> int:
        """Counts a new completion. Returns its number, which :meth:`succeed` and :meth:`fail` take."""
        self._num_begun += 1
        return self._num_begun - 1

    def succeed(self, number: int, in_flight: int) -> None:
        """Records that a completion has ended without failure. ``in_flight`` still includes it."""
        self._end(number)
        if in_flight + self.floor <= self.size or self._num_reports_of_pressure:
            return  # another group would have fitted, so the window was not the limit
        self._num_good += 1
        if self._num_good >= self.size:
            self._num_good = 0
            self.size = min(self.size + 1, self.ceiling)

    def fail(self, number: int) -> None:
        if number >= self._first_after_cut:
            self._end(number)
            self._cut(self.size)

    def report(self, load: ServerLoad | None, in_flight: int) -> None:
        if load is None or not self._is_pressure(load):
            self._num_reports_of_pressure = 0
            return
        self._num_reports_of_pressure += 1
        if self._num_reports_of_pressure >= _REPORTS_OF_PRESSURE:
            self._cut(min(self.size, in_flight))

    def _is_pressure(self, load: ServerLoad) -> bool:
        return load.waiting >= self.floor or (load.kv_use or 0.0) > _FULL_KV

    def _end(self, number: int) -> None:
        if number >= self._first_after_cut:
            self._is_shut = False

    def _cut(self, from_size: int) -> None:
        if self._is_shut:
            return
        self.size = max(from_size // 2, self.floor)
        self.num_cuts += 1
        self._is_shut = True
        self._first_after_cut = self._num_begun
        self._num_good = 0
