# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The phases of a training rank: where its time goes, and whether it is stuck."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchtitan.grpo.system import spans
from torchtitan.grpo.system.cause_clock import CauseClock
from torchtitan.grpo.system.monitoring.site import Health

_CAUSES = {
    "starting": "start",
    "loading weights": "start",
    "starting rollouts": "start",
    "waiting for the first push": "start",
    "waiting for rollouts": "rollouts",
    "planning the step": "plan",
    "forward and backward": "passes",
    "optimizer step": "optimizer",
    "publishing weights": "publish",
    "saving a checkpoint": "checkpoint",
    "evaluating": "evaluation",
    "exporting the model": "export",
}
"""What a phase's time is counted as; ``other`` for the rest."""
_TIMES_LONGER = 3.0
_TRACK = "training"


class Phases:
    """The phases of a training rank. The training thread sets them, and any thread may read them.

    A rank counts as stuck if a phase lasts longer than ``stuck_seconds``, and also longer than three times
    the longest earlier phase of the same name: a run whose steps take an hour is not stuck in the second.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds, self._clock = stuck_seconds, clock
        self._phase, self._since = "starting", clock()
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._completed: int | None = None
        self._completed_at = clock()
        self._causes = CauseClock("start", clock)

    def enter(self, phase: str) -> None:
        now, former = self._clock(), self._phase
        self._longest[former] = max(self._longest[former], now - self._since)
        spans.add(_TRACK, _CAUSES.get(former, "other"), self._since, now, step=self._next_step)
        self._phase, self._since = phase, now
        self._causes.enter(_CAUSES.get(phase, "other"))

    @contextmanager
    def within(self, cause: str) -> Iterator[None]:
        """Counts the time in the context as ``cause``, inside whatever the phase is."""
        with spans.span(_TRACK, cause, step=self._next_step), self._causes.within(cause):
            yield

    def wall_metrics(self, passes: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of each cause since the last call, and of all, which is the time since then.

        The time of the passes is divided in proportion to ``passes``, which were measured on the device:
        the host only waits for them, at some later point. Without a measurement, as in a step that trains
        no token, it counts as ``forward``.
        """
        self._causes.divide("passes", passes if any(passes.values()) else {"forward": 1.0})
        seconds = self._causes.take()
        causes = {f"wall/{cause}_seconds": each for cause, each in seconds.items() if each > 0}
        return causes | {"wall/total_seconds": sum(seconds.values())}

    @property
    def _next_step(self) -> int | None:
        return None if self._completed is None else self._completed + 1

    def complete(self, step: int) -> None:
        self._completed, self._completed_at = step, self._clock()

    def metrics(self) -> dict[str, float]:
        now = self._clock()
        return {
            "monitor/step": float(self._completed or 0),
            "monitor/since_step_seconds": now - self._completed_at,
            "monitor/phase_seconds": now - self._since,
        }

    def health(self, servers: Mapping[str, Any]) -> Health:
        """Returns the rank's state, and whether it is stuck. ``servers`` maps URLs to the servers' states."""
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
