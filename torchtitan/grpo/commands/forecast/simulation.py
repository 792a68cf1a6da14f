# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates a run as a sequence of events.

The code of real runs decides which group may start and which groups form a batch
(:class:`~torchtitan.grpo.rollout.admission.Admission`), and at which server a group starts
(:func:`~torchtitan.grpo.rollout.serving.server_state.best_server`). An event is the next end of a
completion on a server, or the end of scoring, of training on a batch or a part of it, or of a weight push.

Left out: evaluations, failures, the adaptation of windows, predicted lengths, segments
and overdue groups, teachers, and turns of environments and agents.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.commands.forecast.servers import Completion, SimulatedServer
from torchtitan.grpo.commands.forecast.system import System
from torchtitan.grpo.rollout.admission import Admission, part_size
from torchtitan.grpo.rollout.serving.server_state import best_server

_WARM_UP_BATCHES = 3


@dataclass(frozen=True)
class Outcome:
    """Means over all batches but the first ones, in which a run warms up.

    ``trained``, ``waited``, ``pushed`` and ``lent`` are fractions of the training devices' time; ``lent``
    lasts from the decision to lend them until they are back. ``busy`` is the fraction of time in which
    servers with their own hardware generate, and ``lent_tokens`` the fraction of tokens that lent servers
    generate. Ages are in batches.
    """

    step_seconds: float
    samples_per_second: float
    trained: float
    waited: float
    pushed: float
    lent: float
    lent_tokens: float
    busy: float
    mean_age: float
    max_age: int
    num_events: int


@dataclass(eq=False)
class _Group:
    version: int
    left: int
    tokens: int
    is_elsewhere: bool = False  # on a server that is not lent


class Simulation:
    """Simulates a run event by event. Times are in seconds."""

    def __init__(self, system: System, seed: int) -> None:
        self.system, self.now = system, 0.0
        self.admission = Admission(system.grpo, system.rollout)
        own, lent = system.num_servers, system.num_lent
        self.servers = [SimulatedServer(system, index >= own) for index in range(own + lent)]
        self.groups: dict[int, _Group] = {}
        self.homeless: list[Completion] = []  # begun, and on no server
        self.in_flight, self.version = 0, 0
        self.served = 0  # the newest version that a server has
        self.asked_at: float | None = None
        self.pending: list[int] = []  # taken for training, which waits for the devices
        self.totals: dict[str, float] = defaultdict(float)
        self.ages: list[int] = []
        self._random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._ids = itertools.count(), itertools.count()
        self._pushing, self._newest = False, 0
        self._batch: list[_Group] = []
        self._taken: list[int] = []  # of the next part

    def run(self, num_batches: int, factor: float = 1.0) -> Outcome:
        """Simulates batches; ``factor`` is how many times more samples the real system has."""
        self._ask()
        self.start_groups()
        self._run_until(_WARM_UP_BATCHES)
        begin, before, self.ages = self.now, self._totals_now(), []
        self._run_until(_WARM_UP_BATCHES + num_batches)
        seconds = self.now - begin
        of = defaultdict(float, {k: v - before[k] for k, v in self._totals_now().items()})
        return Outcome(
            step_seconds=seconds / num_batches,
            samples_per_second=factor * of["samples"] / seconds,
            trained=of["train"] / seconds, waited=(of["wait"] - of["lent"]) / seconds,
            pushed=of["push"] / seconds, lent=of["lent"] / seconds,
            lent_tokens=of["lent_tokens"] / max(of["tokens"], 1),
            busy=min(1.0, of["busy"] / (seconds * max(1, self.system.num_servers))),
            mean_age=float(np.mean(self.ages)), max_age=max(self.ages), num_events=next(self._order),
        )  # fmt: skip

    def _run_until(self, version: int) -> None:
        while self.version < version:
            self.look()
            if not self._events:
                raise RuntimeError(
                    f"The simulated run stands still: {self.admission.describe()}. This is an error of "
                    "the planner; report it with the configuration."
                )
            self.now, _, handle, arguments = heapq.heappop(self._events)
            handle(*arguments)

    def _totals_now(self) -> dict[str, float]:
        found = self.totals.copy()
        for server in self.servers:
            server.advance(self.now)
            found["tokens"] += server.tokens
            found["lent_tokens" if server.is_lent else "own_tokens"] += server.tokens
            found["busy"] += 0.0 if server.is_lent else server.busy_seconds
        return found

    def at(self, time: float, handle: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), handle, arguments))

    # -- what lending changes ---------------------------------------------------------

    def look(self) -> None:
        """Called before each event."""

    def deliver(self) -> None:
        """Called when the groups that the trainer has asked for are complete."""
        self.train()

    def observe_step(self) -> None:
        """Called after training on a batch."""

    # -- rollouts ---------------------------------------------------------------------

    def start_groups(self) -> None:
        group_size = self.system.grpo.group_size
        if self.homeless:
            self._place_homeless()
        while self.admission.may_start(self.served, self.in_flight):
            versions = {server.version for server in self.servers if server.is_awake}
            usable = {v for v in versions if self.admission.may_start(v, self.in_flight)}
            allowed = (s for s in self.servers if s.is_awake and s.version in usable)
            server = best_server(allowed, num_completions=group_size)
            if server is None:
                return
            limit = self.system.rollout.max_new_tokens
            lengths = self.system.lengths.draw(self._random, group_size, limit)
            number = next(self._ids)
            self.groups[number] = _Group(server.version, group_size, sum(lengths))
            self.admission.start(number, server.version)
            self.in_flight += group_size
            completions = [Completion(number, length) for length in lengths]
            self._give(server, completions, self.system.prompt_tokens)

    def _place_homeless(self) -> None:
        context = self.system.prompt_tokens + self.system.mean_tokens / 2
        awake = [server for server in self.servers if server.is_awake]
        while self.homeless and awake:
            oldest = self.groups[self.homeless[-1].group_id].version
            fresh = (server for server in awake if server.version >= oldest)
            server = best_server(fresh, has_begun=True)
            if server is None:
                return
            self._give(server, [self.homeless.pop()], context)

    def _give(self, server: SimulatedServer, completions: list[Completion], prefill: float) -> None:
        for completion in completions:
            self.groups[completion.group_id].is_elsewhere |= not server.is_lent
        server.advance(self.now)
        server.add(completions, prefill)
        self.plan(server)

    def plan(self, server: SimulatedServer) -> None:
        server.num_events += 1
        if (end := server.next_end()) is not None:
            self.at(end, self._ended, server, server.num_events)

    def _ended(self, server: SimulatedServer, number: int) -> None:
        if number != server.num_events:
            return
        server.advance(self.now)
        ended = server.take_ended()
        self.plan(server)
        self.in_flight -= len(ended)
        for completion in ended:
            group = self.groups[completion.group_id]
            group.left -= 1
            if group.left == 0:
                self.at(self.now + self.system.costs.reward, self._scored, completion.group_id)
        self.start_groups()

    def _scored(self, number: int) -> None:
        if self._random.random() < self.system.dropped:
            del self.groups[number]
            self.admission.close(number)
        else:
            kept = self.admission.finish(number, self.groups[number].version)
            assert kept, "a simulated server has the version that it was attested to have"
        self._try_to_take()
        self.start_groups()

    # -- training ---------------------------------------------------------------------

    def _ask(self) -> None:
        self.asked_at = self.now
        self._try_to_take()

    def _try_to_take(self) -> None:
        if self.asked_at is None or self.pending:
            return
        self.pending = self._take_part() if self.system.rollout.stream else self._take_batch()
        if self.pending:
            self.deliver()

    def train(self) -> None:
        """Trains on the pending groups; the training devices must be free."""
        assert self.asked_at is not None, "the trainer has asked for what was taken"
        self.totals["wait"] += self.now - self.asked_at
        groups = [self.groups.pop(number) for number in self.pending]
        tokens = self.system.trained_tokens(len(groups), sum(group.tokens for group in groups))
        costs, is_first = self.system.costs, not self._batch
        seconds = tokens * costs.train_token + costs.train * is_first
        self.asked_at, self.pending = None, []
        self._batch += groups
        self.at(self.now + seconds, self._trained, seconds)
        self.start_groups()

    def _take_batch(self) -> list[int]:
        if self.admission.num_finished < self.admission.groups_per_batch:
            return []
        return self.admission.take_batch() or []

    def _take_part(self) -> list[int]:
        size, parts = self.system.grpo.prompts_per_step, self.system.rollout.stream_parts
        wanted = min(part_size(size, min(parts, size)), size - len(self._batch))
        while len(self._taken) < wanted:
            number = self.admission.take_next()
            if number is None:
                return []
            self._taken.append(number)
        taken, self._taken = self._taken, []
        return taken

    def _trained(self, seconds: float) -> None:
        self.totals["train"] += seconds
        if len(self._batch) < self.system.grpo.prompts_per_step:
            self._ask()
            return
        self.ages += [self.version - group.version for group in self._batch]
        self.totals["samples"] += self.system.batch_completions
        self._batch = []
        self.version += 1
        self.observe_step()
        self._push()
        if self.system.grpo.async_weight_update:
            self._ask()
        else:
            self.totals["push"] += self.system.costs.push

    def _push(self) -> None:
        if not self._pushing and self._newest < self.version:
            self._pushing, self._newest = True, self.version
            self.at(self.now + self.system.costs.push, self._pushed, self.version)

    def _pushed(self, version: int) -> None:
        self._pushing, self.served = False, version
        for server in self.servers:
            if server.is_awake:
                server.version = version
        self._push()
        if not self.system.grpo.async_weight_update:
            self._ask()
        self.start_groups()
