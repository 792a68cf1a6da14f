# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether a process is well, and what it does."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_TIMES_LONGER = 3.0


@dataclass(frozen=True)
class Health:
    """What ``/healthz`` answers.

    Attributes:
        problem: Why the process is stuck; ``None`` if it is well.
        facts: What else is known, as plain data.
    """

    problem: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        about = {"problem": self.problem} if self.problem is not None else {}
        return {"status": self.status, **about, **self.facts}

    @property
    def status(self) -> str:
        return "ok" if self.problem is None else "stuck"


class Pulse:
    """Follows the phases of a training rank.

    The rank is stuck if its phase lasts longer than ``stuck_seconds`` and than three times the
    longest such phase before: a run whose steps take an hour is not stuck in its second step.

    The training thread only assigns attributes here. Any other thread may read them.

    Args:
        stuck_seconds: ``observe.stuck_seconds``.
        clock: The monotonic clock.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds, self._clock = stuck_seconds, clock
        self._phase, self._since = "starting", clock()
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._completed: int | None = None
        self._completed_at = clock()

    def enter(self, phase: str) -> None:
        """Says what the rank does from now on."""
        now = self._clock()
        former = self._phase
        self._longest[former] = max(self._longest[former], now - self._since)
        self._phase, self._since = phase, now

    def complete(self, step: int) -> None:
        """Says that a step has been completed."""
        self._completed, self._completed_at = step, self._clock()

    def values(self) -> dict[str, float]:
        """Returns the step and the times as metrics."""
        now = self._clock()
        return {
            "monitor/step": float(self._completed or 0),
            "monitor/since_step_seconds": now - self._completed_at,
            "monitor/phase_seconds": now - self._since,
        }

    def health(self, servers: Mapping[str, Any]) -> Health:
        """Returns the health of the rank.

        Args:
            servers: State of each server, by URL.
        """
        now = self._clock()
        phase, lasted = self._phase, now - self._since
        bound = max(self._stuck_seconds, _TIMES_LONGER * self._longest.get(phase, 0.0))
        problem = None
        if lasted > bound:
            problem = (
                f"The phase {phase!r} has lasted {lasted:.0f} s, more than {bound:.0f} s "
                "(observe.stuck_seconds)."
            )
        facts = {
            "phase": phase,
            "phase_seconds": round(lasted, 3),
            "step": self._completed,
            "seconds_since_step": round(now - self._completed_at, 3),
            "servers": dict(servers),
        }
        return Health(problem, facts)
