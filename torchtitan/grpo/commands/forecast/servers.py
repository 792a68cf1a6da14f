# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A simulated server: all running completions get a token in each step."""

import heapq
import itertools
from dataclasses import dataclass

from torchtitan.grpo.commands.forecast.system import System


@dataclass(eq=False, slots=True)
class Completion:
    """A completion with ``length`` tokens left to generate; ``started_at`` is a time on its server's clock."""

    group_id: int
    length: float
    started_at: float = 0.0


class SimulatedServer:
    """A server with the attributes that ``best_server`` reads.

    The server's clock counts its decoding steps. Between two events all steps take equally long, so
    the clock is advanced only when completions start and end.
    """

    def __init__(self, system: System, is_lent: bool) -> None:
        self.version, self.is_lent, self.is_awake = 0, is_lent, not is_lent
        self.busy_seconds, self.tokens = 0.0, 0.0
        self.num_events = 0  # of its plan; an event of an older plan is void
        self._costs, self._window = system.costs, system.window
        self._mean_tokens = system.mean_tokens
        self._clock, self._at, self._prefill_seconds = 0.0, 0.0, 0.0
        self._running: list[tuple[float, int, Completion]] = []  # with the clock at their ends
        self._started = 0.0  # sum over the running completions
        self._order = itertools.count()  # of completions that end together

    @property
    def load(self) -> int:
        return len(self._running)

    def free_places(self) -> float:
        return self._window - len(self._running)

    def remaining_tokens(self) -> float:
        written = len(self._running) * self._clock - self._started
        return max(0.0, len(self._running) * self._mean_tokens - written)

    def tokens_per_second(self) -> float:
        """The rate at which the server generates with its window full."""
        return self._window / (self._costs.token + self._costs.beside * self._window)

    def _step_seconds(self) -> float:
        return self._costs.token + self._costs.beside * self.load

    def advance(self, now: float) -> None:
        elapsed, self._at = now - self._at, now
        if not self._running:
            return
        self.busy_seconds += elapsed
        paid = min(self._prefill_seconds, elapsed)
        self._prefill_seconds -= paid
        steps = (elapsed - paid) / self._step_seconds()
        self._clock += steps
        self.tokens += steps * self.load

    def add(self, completions: list[Completion], prefill_tokens: float) -> None:
        """Starts completions now. The prefill of ``prefill_tokens`` tokens delays the next step."""
        self._prefill_seconds += prefill_tokens * self._costs.prefill
        for completion in completions:
            completion.started_at = self._clock
            self._started += self._clock
            delay = self._costs.request / (self._step_seconds() + self._costs.beside)
            end = self._clock + completion.length + delay
            heapq.heappush(self._running, (end, next(self._order), completion))

    def next_end(self) -> float | None:
        """The time at which the next completion ends, if nothing changes before."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._clock)
        return self._at + self._prefill_seconds + tokens * self._step_seconds()

    def take_ended(self) -> list[Completion]:
        ended = []
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
            self._started -= ended[-1].started_at
        return ended

    def cut(self) -> list[Completion]:
        """Ends all requests. Returns their completions, each with the length that it has left."""
        cut = [completion for _, _, completion in self._running]
        for completion in cut:
            written = int(max(0.0, self._clock - completion.started_at))  # whole tokens
            completion.length = max(1.0, completion.length - written)
        self._running, self._started = [], 0.0
        return cut
