# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How many completions a server is given at once: additive increase, multiplicative decrease.

Chiu and Jain (1989, https://doi.org/10.1016/0169-7552(89)90019-6), as TCP has it: one more
with each window of completions that met no pressure, half of them when there is some. Of TCP
we also keep that one burst of losses is one sign of pressure, that what was not used does not
grow, and that it is the half of what was in flight; there is no slow start, since a server
begins with its share of ``rollout.max_concurrent_rollouts``.

Pure bookkeeping, no clock and no asyncio.
"""

from torchtitan.grpo.inference.client import ServerLoad

_FULL_KV = 0.9
_REPORTS_OF_PRESSURE = 2


class ConcurrencyWindow:
    """The window of one server.

    State: ``size``, in completions, and::

        OPEN --pressure: size = half--> SHUT --a completion begun since then ended--> OPEN

    While it is SHUT there is no second cut: whatever ends was begun before the first one, and
    says nothing of its effect. So there is at most one cut in the time that a completion takes.

    A group begins whole, while fewer than ``size`` completions are in flight. Hence the invariants::

        floor <= size <= ceiling
        new work never brings more than size + group_size - 1 completions in flight

    Pressure is a failed or overdue completion, and a report of a queue or of full memory if the
    report before it had one as well: a group that has just come waits for a moment everywhere. A
    queue shorter than a group is none.

    Args:
        floor: ``grpo.group_size``, so that a group can start on an idle server.
        ceiling: ``rollout.max_concurrent_rollouts``.
        share: Completions of the beginning; brought into those bounds.
    """

    def __init__(self, *, floor: int, ceiling: int, share: int) -> None:
        self.floor = min(floor, ceiling)
        self.ceiling = ceiling
        self.size = min(max(share, self.floor), ceiling)
        self.num_cuts = 0
        self._num_begun = 0
        self._first_after_cut = 0
        self._num_good = 0
        self._num_reports_of_pressure = 0
        self._is_shut = False

    def offer(self, share: int) -> None:
        """A larger share, as when another server has left. Nothing once there was pressure."""
        if self.num_cuts == 0:
            self.size = min(max(share, self.size), self.ceiling)

    def begin(self) -> int:
        """A completion is sent; returns its number, which its end names again."""
        self._num_begun += 1
        return self._num_begun - 1

    def succeed(self, number: int, in_flight: int) -> None:
        """Completion ``number`` has ended well; ``in_flight`` counts it still."""
        self._end(number)
        if in_flight + self.floor <= self.size or self._num_reports_of_pressure:
            return  # another group would have fitted: nothing says that there is room for more
        self._num_good += 1
        if self._num_good >= self.size:
            self._num_good = 0
            self.size = min(self.size + 1, self.ceiling)

    def fail(self, number: int) -> None:
        """Completion ``number`` has failed, or was not answered in time."""
        if number >= self._first_after_cut:
            self._end(number)
            self._cut(self.size)

    def report(self, load: ServerLoad | None, in_flight: int) -> None:
        """What the server says of itself; None where it says nothing."""
        if load is None or not self._is_pressure(load):
            self._num_reports_of_pressure = 0
            return
        self._num_reports_of_pressure += 1
        if self._num_reports_of_pressure >= _REPORTS_OF_PRESSURE:
            self._cut(min(self.size, in_flight))

    def _is_pressure(self, load: ServerLoad) -> bool:
        has_queue = load.waiting >= self.floor
        return has_queue or (load.kv_use is not None and load.kv_use > _FULL_KV)

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
