# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Health and metrics of an embedded server."""

import time
from collections.abc import Callable

from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.monitoring.site import Health

_STUCK_SECONDS = 120.0


class EngineMonitor:
    """Reads the engine whenever it is asked.

    The server is stuck if its engine has ended, or if it has running requests, is not paused, and
    has taken no step between two questions that lie more than two minutes apart.

    Args:
        engine: The engine.
        clock: The monotonic clock.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._num_steps, self._seen_at = -1, clock()

    def health(self) -> Health:
        """Returns the health of the server."""
        engine, now = self._engine, self._clock()
        is_idle = engine.num_running == 0 or engine.pause_mode is not None
        if engine.num_steps != self._num_steps or is_idle:
            self._num_steps, self._seen_at = engine.num_steps, now
        without = now - self._seen_at
        problem = None
        if not engine.is_alive:
            problem = f"The engine is not running: {engine.failure!r}."
        elif without > _STUCK_SECONDS:
            problem = (
                f"{engine.num_running} requests run, and no step was taken for {without:.0f} s."
            )
        facts = {
            "phase": "paused"
            if engine.pause_mode is not None
            else "idle"
            if is_idle
            else "generating",
            "version": engine.version,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
        }
        return Health(problem, facts)

    def metrics(self) -> dict[str, float]:
        """Returns the load, and counts since the start of the server."""
        engine = self._engine
        load = engine.load()
        return {
            "server/running": float(load.running),
            "server/waiting": float(load.waiting),
            "server/kv_use": float(load.kv_use or 0.0),
            "server/is_paused": float(engine.pause_mode is not None),
            "server/tokens_total": float(engine.num_tokens),
            "server/steps_total": float(engine.num_steps),
            "server/recomputed_total": float(engine.num_recomputed),
            "server/swaps_total": float(engine.num_swaps),
        }
