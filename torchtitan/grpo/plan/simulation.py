# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates a run as a sequence of events.

Which group may start, and which groups form a batch, is decided by the run's own
:class:`~torchtitan.grpo.rollout.admission.Admission`, and where a group starts by its own
:func:`~torchtitan.grpo.rollout.serving.server_state.best_server`. An event is the next end of a
completion on a server, the end of scoring, of training on a batch or on a part of it, or of a push.

Left out: evaluations, failures, the adaptation of windows, hedged requests, teachers, and turns of
environments and agents. Segments are not simulated one by one; they matter to ``rollout.overdue``.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.plan.lending import Lender
from torchtitan.grpo.plan.servers import Completion, SimulatedServer
from torchtitan.grpo.plan.system import System, scaled
from torchtitan.grpo.rollout.admission import Admission, part_size
from torchtitan.grpo.rollout.lending.scheduler import Lent
from torchtitan.grpo.rollout.serving.server_state import best_server

_WARM_UP_BATCHES = 3
_BATCHES = 12
# Weight of a new completion in the mean length, by which servers are compared.
_LENGTH_GAIN = 0.02


@dataclass(frozen=True)
class Outcome:
    """Means over the batches after the first ones.

    ``trained``, ``waited``, ``pushed`` and ``lent`` are fractions of the training devices' time, where
    ``lent`` is from the decision to lend them until they are back. ``busy`` is the fraction of the time
    in which servers with their own hardware generate, ``lent_tokens`` the part of the tokens that lent
    servers generate, and ``wasted`` that of tokens that are not trained on. Ages are in batches.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    trained: float
    waited: float
    pushed: float
    lent: float
    lent_tokens: float
    busy: float
    mean_age: float
    max_age: int
    wasted: float
    num_events: int


@dataclass(eq=False)
class _Group:
    lengths: list[int]
    version: int = 0
    left: int = 0
    tokens: int = 0
    missing: int = 0  # tokens that are not generated, because the group was cut
    context: int = 0  # tokens of a resumed group, which are not generated again


def simulate(system: System, seed: int = 0, num_batches: int = _BATCHES) -> Outcome:
    """Simulates a system, a large one in reduced form. Equal arguments give equal results."""
    small, factor = scaled(system)
    return Simulation(small, seed).run(num_batches, factor)


class Simulation:
    """The state of a run. Times are in seconds."""

    def __init__(self, system: System, seed: int) -> None:
        self.system, self.now = system, 0.0
        self.admission = Admission(system.grpo, system.rollout)
        own, lent = system.num_servers, system.num_lent
        windows = [system.window(own)] * own + [system.window(own + lent)] * lent
        self.servers = [
            SimulatedServer(system.costs, window, system.max_running, is_lent=index >= own)
            for index, window in enumerate(windows)
        ]
        self.ages: list[int] = []
        self.totals: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.groups: dict[int, _Group] = {}
        self._coming: deque[_Group] = deque()
        self.homeless: list[Completion] = []
        self._ids = itertools.count()
        self.in_flight = 0
        self.mean_tokens = float(system.rollout.max_new_tokens)
        self.version, self._pushing, self._newest = 0, False, 0
        self.asked_at: float | None = None
        self._batch: list[_Group] = []
        self._taken: list[int] = []  # of the next part
        self.pending: list[int] = []  # waits for the devices
        self.lender = Lender(self) if system.num_lent else None
        self._reward_places = [0.0] * system.reward_places

    def run(self, num_batches: int, factor: float = 1.0) -> Outcome:
        """``factor`` is how many times more samples the real system has."""
        self._ask()
        self.start_groups()
        self._run_until(_WARM_UP_BATCHES)
        begin, before, self.ages = self.now, self._snapshot(), []
        self._run_until(_WARM_UP_BATCHES + num_batches)
        seconds, totals = self.now - begin, self._snapshot()
        totals.subtract(before)
        num_servers = max(1, self.system.num_servers)
        made = totals["tokens"] + totals["wasted_tokens"]
        return Outcome(
            step_seconds=seconds / num_batches,
            samples_per_second=factor * totals["samples"] / seconds,
            tokens_per_second=factor * totals["tokens"] / seconds,
            trained=totals["train"] / seconds,
            waited=(totals["wait"] - totals["lent"]) / seconds,
            pushed=totals["push"] / seconds,
            lent=totals["lent"] / seconds,
            lent_tokens=totals["lent_tokens"] / max(totals["all_tokens"], 1),
            busy=min(1.0, totals["busy"] / (seconds * num_servers)),
            mean_age=float(np.mean(self.ages)),
            max_age=max(self.ages),
            wasted=totals["wasted_tokens"] / max(made, 1),
            num_events=next(self._order),
        )

    def _run_until(self, version: int) -> None:
        while self.version < version:
            if self.lender is not None:
                self.lender.look()
            if not self._events:
                raise RuntimeError(
                    f"The simulated run stands still: {self.admission.describe()}. This is an error of "
                    "the planner; report it with the configuration."
                )
            self.now, _, handle, arguments = heapq.heappop(self._events)
            handle(*arguments)

    def _snapshot(self) -> Counter[str]:
        for server in self.servers:
            server.advance(self.now)
        busy = sum(server.busy_seconds for server in self.servers if not server.is_lent)
        lent_tokens = sum(server.tokens for server in self.servers if server.is_lent)
        found = Counter(self.totals)
        all_tokens = sum(server.tokens for server in self.servers)
        found.update({"busy": busy, "lent_tokens": lent_tokens, "all_tokens": all_tokens})
        return found

    def at(self, time: float, handle: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), handle, arguments))

    # -- rollouts ---------------------------------------------------------------------

    def start_groups(self) -> None:
        group_size = self.system.grpo.group_size
        if self.homeless:
            self._place_homeless()
        most = self.system.rollout.max_concurrent_rollouts
        while self.in_flight + group_size <= most:  # admission would refuse, only slower
            allowed: dict[int, bool] = {}
            for server in self.servers:
                if server.is_awake and server.version not in allowed:
                    allowed[server.version] = self.admission.may_start(
                        server.version, self.in_flight
                    )
            usable = (s for s in self.servers if s.is_awake and allowed[s.version])
            server = best_server(usable, num_completions=group_size)
            if server is None:
                return
            group = self._next_group()
            number = next(self._ids)
            self.groups[number] = group
            self.admission.start(number, server.version)
            group.version, group.left = server.version, len(group.lengths)
            self.in_flight += len(group.lengths)
            longest_first = self.system.rollout.longest_first
            expected = float(np.mean(group.lengths)) if longest_first else self.mean_tokens
            completions = [Completion(number, length, expected) for length in group.lengths]
            self._give(server, completions, self.system.prompt_tokens + group.context)

    def _next_group(self) -> _Group:
        """With ``longest_first``, predictions are perfect: what it gains at best."""
        if not self._coming:
            grpo, rollout = self.system.grpo, self.system.rollout
            window = grpo.prompts_per_step if rollout.longest_first else 1
            draw, limit = self.system.lengths.draw, rollout.max_new_tokens
            groups = [_Group(draw(self._random, grpo.group_size, limit)) for _ in range(window)]
            self._coming.extend(sorted(groups, key=lambda group: -sum(group.lengths)))
        return self._coming.popleft()

    def _give(self, server: SimulatedServer, completions: list[Completion], prefill: float) -> None:
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
                self._score(completion.group_id, group)
        self.start_groups()

    def _score(self, number: int, group: _Group) -> None:
        for length in group.lengths:
            self.mean_tokens += _LENGTH_GAIN * (length - self.mean_tokens)
        group.tokens = sum(group.lengths) - group.missing
        begin = max(self.now, heapq.heappop(self._reward_places))
        end = begin + self.system.costs.reward
        heapq.heappush(self._reward_places, end)
        self.at(end, self._scored, number)

    def _scored(self, number: int) -> None:
        group = self.groups[number]
        if self._random.random() < self.system.dropped:
            self._drop(number)
        else:
            kept = self.admission.finish(number, group.version)
            assert kept, "a simulated server has the version that it was attested to have"
        self._try_to_take()
        self.start_groups()

    def _drop(self, number: int) -> None:
        self.totals["wasted_tokens"] += sum(self.groups.pop(number).lengths)
        self.admission.close(number)

    def _place_homeless(self) -> None:
        awake = [server for server in self.servers if server.is_awake]
        while self.homeless and awake:
            completion = self.homeless[-1]
            oldest = self.groups[completion.group_id].version
            fresh = (server for server in awake if server.version >= oldest)
            server = best_server(fresh, has_begun=True)
            if server is None:
                return
            context = self.system.prompt_tokens + self.mean_tokens / 2
            self._give(server, [self.homeless.pop()], context)

    def _relieve_overdue(self) -> None:
        """What ``rollout.overdue`` does when only groups that are due hold up the batch."""
        way = self.system.rollout.overdue
        if way == "wait" or not (due := self.admission.overdue()):
            return
        for number in due:
            group, rests = self.groups[number], []
            if group.left == 0:
                continue  # it is being scored
            for server in self.servers:
                server.advance(self.now)
                rests += server.cut({number})
                self.plan(server)
            rests += [c for c in self.homeless if c.group_id == number]
            self.homeless = [c for c in self.homeless if c.group_id != number]
            self.in_flight -= len(rests)
            missing = int(sum(completion.length for completion in rests))
            if way == "cut":
                group.missing, group.left = missing, 0
                self._score(number, group)
                continue
            self.totals["wasted_tokens"] += sum(group.lengths) - missing
            del self.groups[number]
            self.admission.close(number)
            if way == "resume":
                # Completions that had ended are generated again.
                ended = len(group.lengths) - len(rests)
                again = sorted(group.lengths)[:ended]
                lengths = [int(c.length) for c in rests] + again
                self._coming.appendleft(_Group(lengths, context=sum(group.lengths) - missing))
        self.start_groups()

    # -- training ---------------------------------------------------------------------

    def _ask(self) -> None:
        self.asked_at = self.now
        self._try_to_take()

    def _try_to_take(self) -> None:
        if self.asked_at is None or self.pending:
            return
        self.pending = self._take_part() if self.system.rollout.stream else self._take_batch()
        if not self.pending:
            self._relieve_overdue()
        elif self.lender is None or self.lender.lent is Lent.NO:
            self.train()

    def train(self) -> None:
        """Trains on what was taken. The devices are free."""
        assert self.asked_at is not None, "the trainer has asked for what was taken"
        self.totals["wait"] += self.now - self.asked_at
        self.asked_at = None
        groups = [self.groups.pop(number) for number in self.pending]
        self.pending = []
        costs, is_first = self.system.costs, not self._batch
        self._batch += groups
        size = self.system.grpo.group_size
        tokens = sum(group.tokens for group in groups) + self.system.prompt_tokens * size * len(
            groups
        )
        seconds = tokens * costs.train_token + costs.train * is_first
        self.at(self.now + seconds, self._trained, seconds)
        self.start_groups()

    def num_missing(self) -> int:
        """Groups that the batch, or the part, still waits for."""
        return self._part_size() - len(self._taken) - self.admission.num_finished

    def _take_batch(self) -> list[int]:
        if self.admission.num_finished < self.admission.groups_per_batch:
            return []
        return self.admission.take_batch() or []

    def _take_part(self) -> list[int]:
        size = self._part_size()
        while len(self._taken) < size:
            number = self.admission.take_next()
            if number is None:
                return []
            self._taken.append(number)
        taken, self._taken = self._taken, []
        return taken

    def _part_size(self) -> int:
        grpo, rollout = self.system.grpo, self.system.rollout
        if not rollout.stream:
            return grpo.prompts_per_step
        size = part_size(grpo.prompts_per_step, min(rollout.stream_parts, grpo.prompts_per_step))
        return min(size, grpo.prompts_per_step - len(self._batch))

    def _trained(self, seconds: float) -> None:
        self.totals["train"] += seconds
        if len(self._batch) < self.system.grpo.prompts_per_step:
            self._ask()
            return
        self.ages += [self.version - group.version for group in self._batch]
        self.totals["samples"] += sum(len(group.lengths) for group in self._batch)
        self.totals["tokens"] += sum(group.tokens for group in self._batch)
        self._batch = []
        self.version += 1
        if self.lender is not None:
            self.lender.observe_step()
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
        self._pushing = False
        for server in self.servers:
            if server.is_awake:
                server.version = version
        self._push()
        if not self.system.grpo.async_weight_update:
            self._ask()
        self.start_groups()
