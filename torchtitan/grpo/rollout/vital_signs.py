# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Health and metrics of the rollout process, from what its parts know at the moment."""

import time
from collections.abc import Callable

from torchtitan.grpo.monitoring.health import Health
from torchtitan.grpo.rollout.session import RolloutSession


class VitalSigns:
    """Follows whether the process gets on.

    It is stuck if it has not become ready, has had no server that takes work, or has finished no
    completion for a batch that rank 0 waits for, each for longer than ``stuck_seconds``.

    Args:
        stuck_seconds: ``observe.stuck_seconds``.
        startup_seconds: How long servers may take to start; only then starting counts as stuck.
        clock: The monotonic clock.
    """

    def __init__(
        self,
        stuck_seconds: float,
        startup_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck_seconds, self._startup_seconds = stuck_seconds, startup_seconds
        self._clock = clock
        self._began = self._had_server = self._got_on = clock()
        self._num_ended = 0
        self._session: RolloutSession | None = None

    def begin(self, session: RolloutSession) -> None:
        """Says that the session is open."""
        self._session = session
        self._had_server = self._got_on = self._clock()

    def note(self) -> None:
        """Compares with the last call. To be called about once a second."""
        if self._session is None:
            return
        dispatcher, now = self._session.dispatcher, self._clock()
        if any(server.is_ready() for server in dispatcher.servers.values()):
            self._had_server = now
        num_ended = dispatcher.num_tokens
        if num_ended != self._num_ended or not self._session.producer.is_asked:
            self._num_ended, self._got_on = num_ended, now

    def health(self) -> Health:
        """Returns the health of the process, with the state of each server."""
        if self._session is None:
            lasted = self._clock() - self._began
            bound = max(self._stuck_seconds, self._startup_seconds)
            problem = f"It has been starting for {lasted:.0f} s." if lasted > bound else None
            return Health(problem, {"phase": "starting", "phase_seconds": round(lasted, 3)})
        self.note()
        now, dispatcher = self._clock(), self._session.dispatcher
        without, waiting = now - self._had_server, now - self._got_on
        problem = None
        if without > self._stuck_seconds:
            problem = f"No server has been able to take work for {without:.0f} s."
        elif waiting > self._stuck_seconds:
            problem = f"Rank 0 waits for a batch, and no completion has ended for {waiting:.0f} s."
        servers = {
            url: {
                "state": "ready" if server.is_ready() else "lost" if server.is_lost else "waiting",
                "version": server.version,
                "inflight_rollouts": server.load,
            }
            for url, server in dispatcher.servers.items()
        }
        is_asked = self._session.producer.is_asked
        facts = {
            "phase": "generating for a waiting trainer" if is_asked else "generating ahead",
            "seconds_without_server": round(without, 3),
            "seconds_without_completion": round(waiting, 3),
            "servers": servers,
        }
        return Health(problem, facts)

    def values(self) -> dict[str, float]:
        """Returns counts since the start of the process, and the work on each server."""
        if self._session is None:
            return {}
        session = self._session
        dispatcher = session.dispatcher
        is_ready = [server.is_ready() for server in dispatcher.servers.values()]
        return dispatcher.metrics() | {
            "monitor/tokens_total": float(dispatcher.num_tokens),
            "monitor/failed_requests_total": float(dispatcher.num_failed_requests),
            "monitor/dropped_total": float(sum(session.drops.counts.values())),
            "monitor/ready_servers": float(sum(is_ready)),
            "rollout/inflight_rollouts": float(dispatcher.in_flight),
            "rollout/buffer_groups": float(session.producer.num_buffered),
        }
