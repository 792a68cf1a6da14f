# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A simulated server: all running completions get a token in each step."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from torchtitan.grpo.plan.system import Costs


@dataclass(eq=False, slots=True)
class Completion:
    """``length`` is what it still lacks. ``started_at`` and ``ends_at`` are on its server's clock."""

    group_id: int
    length: float
    expected: float
    started_at: float = 0.0
    ends_at: float = 0.0


class SimulatedServer:
    """Has what ``best_server`` asks of a server.

    Its clock counts the tokens that a completion got which has run from the start. Between two events
    the step takes equally long, so the clock is moved only when completions start and end.
    """

    def __init__(self, costs: Costs, window: int, max_running: int, *, is_lent: bool) -> None:
        self.version, self.is_lent, self.is_awake = 0, is_lent, not is_lent
        self.busy_seconds, self.tokens = 0.0, 0.0
        self.num_events = 0  # of its plan; an event of an older plan is void
        self._costs, self._window, self._max_running = costs, window, max_running
        self._clock, self._at, self._prefill_seconds = 0.0, 0.0, 0.0
        self._running: list[tuple[float, int, Completion]] = []
        self._waiting: deque[Completion] = deque()
        self._expected, self._started = 0.0, 0.0  # sums over the running completions
        self._order = itertools.count()  # of completions that end together

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def free_places(self) -> float:
        return self._window - self.load

    def remaining_tokens(self) -> float:
        written = len(self._running) * self._clock - self._started
        waiting = sum(completion.expected for completion in self._waiting)
        return max(0.0, self._expected - written) + waiting

    def step_seconds(self) -> float:
        return self._costs.token + self._costs.beside * len(self._running)

    def advance(self, now: float) -> None:
        elapsed, self._at = now - self._at, now
        if not self._running:
            return
        self.busy_seconds += elapsed
        paid = min(self._prefill_seconds, elapsed)
        self._prefill_seconds -= paid
        steps = (elapsed - paid) / self.step_seconds()
        self._clock += steps
        self.tokens += steps * len(self._running)

    def runs(self) -> set[int]:
        """The groups of its completions."""
        return {entry[2].group_id for entry in self._running} | {c.group_id for c in self._waiting}

    def tokens_per_second(self) -> float:
        """With its window full."""
        return self._window / (self._costs.token + self._costs.beside * self._window)

    def add(self, completions: list[Completion], prefill_tokens: float) -> None:
        """Starts completions now. ``prefill_tokens`` are computed before the next step."""
        self._prefill_seconds += prefill_tokens * self._costs.prefill
        self._waiting.extend(completions)
        self._fill()

    def _fill(self) -> None:
        limit = self._max_running or self.load
        while self._waiting and len(self._running) < limit:
            completion = self._waiting.popleft()
            completion.started_at = self._clock
            delay = self._costs.request / (self.step_seconds() + self._costs.beside)
            completion.ends_at = self._clock + completion.length + delay
            heapq.heappush(self._running, (completion.ends_at, next(self._order), completion))
            self._expected += completion.expected
            self._started += completion.started_at

    def next_end(self) -> float | None:
        """The time at which the next completion ends, if nothing changes before."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._clock)
        return self._at + self._prefill_seconds + tokens * self.step_seconds()

    def take_ended(self) -> list[Completion]:
        ended = []
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
            self._leave(ended[-1])
        self._fill()
        return ended

    def cut(self, group_ids: set[int]) -> list[Completion]:
        """Ends the requests of these groups. Returns their completions, with what each still lacks."""
        found = [c for c in self._waiting if c.group_id in group_ids]
        self._waiting = deque(c for c in self._waiting if c.group_id not in group_ids)
        left = []
        for entry in self._running:
            completion = entry[2]
            if completion.group_id not in group_ids:
                left.append(entry)
                continue
            written = min(self._clock - completion.started_at, completion.length - 1)
            completion.length -= int(max(0.0, written))  # a server has written whole tokens
            self._leave(completion)
            found.append(completion)
        self._running = left
        heapq.heapify(self._running)
        self._fill()
        return found

    def _leave(self, completion: Completion) -> None:
        self._expected -= completion.expected
        self._started -= completion.started_at
