# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out what the trainer waits for while it waits for rollouts, and what the servers wait for.

While the trainer waits, its time has one of these causes at every moment, the first that holds:

    rewards         all groups that the batch lacks are written, and are being scored
    teacher         the same, but they are being rated by a teacher
    no_server       no server is ready
    episodes        environments or agents hold completions, and no server generates any of the batch
    bound, buffer   nothing of the batch is being generated, because no group may start
    stalled_server  all servers that generate for the batch have stopped answering
    slow_server     they are much slower than the others
    tail            at most a quarter of the batch's completions is left
    concurrency     a server has no requests, but rollout.max_concurrent_rollouts is reached
    generation      anything else

If groups may not start while the trainer is busy, this delays a later batch by at most the same time:
one of the next ``rollout.max_head_offpolicyness + 1`` batches, in which they could have been trained.
That part of the wait for generation, its tail included, is counted as ``bound``
(``rollout.max_head_offpolicyness``) or ``buffer`` (``rollout.buffer_size_limit``).
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.judging import GroupJudge
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.trajectory import RunningGroup
from torchtitan.grpo.system.cause_clock import CauseClock

_TAIL_PART = 0.25
_SLOW_PART = 0.5
# Looking at all requests takes about a millisecond with thousands of them.
_LOOK_SECONDS = 0.05


class RolloutWaits:
    """Follows the causes of waits in a rollout process. Call :meth:`note` at each change, and regularly."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        judge: GroupJudge,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission, self._dispatcher, self._judge = admission, dispatcher, judge
        self._look_at = 0.0
        self._wait, self._held, self._idle = (CauseClock(now=now) for _ in range(3))
        # For each of the last batches, the seconds that have not explained a wait yet.
        self._late = deque[dict[str, float]](maxlen=admission.max_staleness + 1)

    def note(self, awaited: Sequence[RunningGroup] | None) -> None:
        """Notes what is waited for now. ``awaited`` are the running groups that the next batch lacks.

        It is None while the trainer does not wait.
        """
        in_flight, servers = self._dispatcher.in_flight, self._dispatcher.servers.values()
        ready = [server for server in servers if server.is_ready()]
        self._idle.enter("idle" if in_flight == 0 or not ready else "")
        held = self._held_by(ready, in_flight)
        self._held.enter(held if awaited is None else "")
        if awaited is None:
            self._wait.enter("")
            self._look_at = 0.0
        elif time.monotonic() >= self._look_at:
            self._wait.enter(self._cause(awaited, ready, held))
            self._look_at = time.monotonic() + _LOOK_SECONDS

    def take(self, *, mostly_judge: bool) -> dict[str, float]:
        """Returns metrics since the last call. With ``mostly_judge``, a judge took most time of the scoring."""
        shares = {"rollout/idle_fraction": _share(self._idle.take(), "idle")}
        held = self._held.take()
        shares["rollout/wait_trainer_fraction"] = _share(held, "bound", "buffer", "partly")
        self._late.append(held)
        for late in self._late:
            for cause in ("bound", "buffer"):
                for source in ("generation", "concurrency", "tail"):
                    late[cause] = self._wait.move(late.get(cause, 0.0), source, cause)
        waits = self._wait.take()
        rewards = _share(waits, "rewards", "teacher")
        shares["rollout/wait_rewards_fraction"] = rewards
        shares["rollout/wait_episodes_fraction"] = _share(waits, "episodes")
        if mostly_judge:
            waits["judge"] = waits.pop("rewards", 0.0)
        waits.pop("", None)
        return shares | {f"wait/{cause}_seconds": s for cause, s in waits.items() if s > 0}

    def _held_by(self, ready: Sequence[Server], in_flight: int) -> str:
        """Returns what keeps groups from starting on a server with room; empty if nothing does.

        It is ``partly`` if it keeps them only from some servers, such as those that lack new weights.
        """
        reasons = [
            self._admission.waits_for_trainer(server.version, in_flight)
            for server in ready
            if server.version is not None
        ]
        return next(filter(None, reasons), "") if all(reasons) else "partly" if any(reasons) else ""

    def _cause(self, awaited: Sequence[RunningGroup], ready: Sequence[Server], held: str) -> str:
        dispatcher = self._dispatcher
        # A group that the batch needs may not have started yet.
        are_all = 0 < len(awaited) == self._admission.num_missing
        if are_all and all(group.task is None for group in awaited):
            return "rewards" if self._judge.is_scoring else "teacher"
        if not ready:
            return "no_server"
        ids = {group.prompt.group_id for group in awaited}
        holders = [s for s in ready if any(job.group_id in ids for job in s.jobs)]
        if awaited and dispatcher.num_held and not holders:
            return "episodes"
        if not awaited and held in ("bound", "buffer"):
            return held
        return self._cause_in_generation(awaited, ready, holders, are_all=are_all)

    def _cause_in_generation(
        self,
        awaited: Sequence[RunningGroup],
        ready: Sequence[Server],
        holders: Sequence[Server],
        *,
        are_all: bool,
    ) -> str:
        if holders and all(server.is_silent for server in holders):
            return "stalled_server"
        if holders and _are_slow(holders, ready):
            return "slow_server"
        left = sum(not t.task.done() for group in awaited for t in group.trajectories)
        if are_all and left <= _TAIL_PART * self._admission.completions_per_batch:
            return "tail"
        is_full = not self._admission.has_capacity(self._dispatcher.in_flight)
        if is_full and any(not server.jobs for server in ready):
            return "concurrency"
        return "generation"


def _are_slow(holders: Sequence[Server], ready: Sequence[Server]) -> bool:
    others = [s.tokens_per_second for s in ready if s not in holders and s.tokens_per_second]
    if not others:
        return False
    limit = _SLOW_PART * statistics.median(others)
    return all(0 < server.tokens_per_second < limit for server in holders)


def _share(seconds: dict[str, float], *causes: str) -> float:
    total = sum(seconds.values())
    return sum(seconds.get(cause, 0.0) for cause in causes) / total if total > 0 else 0.0
