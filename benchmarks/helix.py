# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""HelixPipe's schedule on paper (https://arxiv.org/abs/2507.00394), for `long_rows.py`.

A layer's parts with weights lie on one rank, and successive layers on successive ranks. The
attention of different microbatches is computed on different ranks at the same time, so that the
slow quadratic part is no longer on the way of one microbatch after the other. What precedes and
follows attention sends the hidden states there and gets them back.

Kept of the paper: the partition, with the projection of q, k and v beside attention, which receives
its weights; first in, last out, in loops of twice as many microbatches as ranks; and recomputation of
everything but attention. More than the paper, in Helix's favour: ranks take whatever is ready, in the
best of several orders and placements, and the gradients of weights may be computed later. The
embedding and the output layer are left out, as they are for the other schedules.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class PartTimes:
    """Times of one layer's parts and a microbatch, in seconds.

    Attributes:
        linear: Forward time of the linear layers but q, k and v. Their I and W take as long each.
        qkv: Forward time of the projection of q, k and v; its I and W take as long each.
        attention: Forward time of attention.
        attention_backward: Backward time of attention, which has no weights.
        hidden_hop: Time for which one tensor of the hidden states travels to another rank.
        weights_hop: Time for which the weights of q, k and v do.
        linear_pending: Hidden states that the factors of the linear layers' weight gradients take.
        qkv_pending: The same of the projection of q, k and v.
    """

    linear: float
    qkv: float
    attention: float
    attention_backward: float
    hidden_hop: float
    weights_hop: float
    linear_pending: float
    qkv_pending: float


class Task(NamedTuple):
    """A part of a microbatch's way: ``part`` 2k is what lies between attentions, 2k + 1 attention."""

    kind: Literal["F", "B", "W"]
    part: int
    microbatch: int


Place = Callable[[int, int], int]
"""Rank of the attention of a layer and microbatch."""
Order = Callable[[Task], tuple[int, ...]]
"""Of the tasks that are ready, a rank takes the one for which this is least."""


@dataclass(frozen=True)
class Helix:
    """A simulated schedule.

    Attributes:
        makespan: Time of the whole step.
        peak: The most memory that a rank holds, in hidden states of a microbatch.
        sent: The longest time for which one rank's link sends.
    """

    makespan: float
    peak: float
    sent: float


def best_helix(
    times: PartTimes,
    num_ranks: int,
    num_layers: int,
    num_microbatches: int,
    held: int,
    *,
    defers: bool,
) -> Helix:
    """Returns the fastest of several placements and orders.

    Args:
        times: Times of a layer's parts.
        num_ranks: Number of ranks. It divides the number of layers.
        num_layers: Number of layers.
        num_microbatches: Number of microbatches.
        held: How many microbatches may be under way.
        defers: Whether gradients of weights may be computed later.
    """
    found = []
    for place, order in itertools.product(_places(num_ranks), _ORDERS):
        way = _Way(times, num_ranks, num_layers, num_microbatches, place, defers)
        found.append(_simulate(way, order, held))
    return min(found, key=lambda one: one.makespan)


def _places(num_ranks: int) -> Iterator[Place]:
    for offset, direction in itertools.product((0, 1), (1, -1)):
        yield lambda layer, m, o=offset, d=direction: (layer + o + d * m) % num_ranks


_ORDERS: tuple[Order, ...] = (
    # Backward passes first, last in first out; weights last.
    lambda t: ("BFW".index(t.kind), -t.microbatch if t.kind == "B" else t.microbatch, t.part),
    # The same, and forward passes that are further on their way first.
    lambda t: ("BFW".index(t.kind), -t.microbatch if t.kind == "B" else 0, -t.part, t.microbatch),
    # Layer after layer.
    lambda t: (
        ("BFW".index(t.kind), -t.part, -t.microbatch)
        if t.kind == "B"
        else ("BFW".index(t.kind), t.part, t.microbatch)
    ),
    # The same, forward passes first.
    lambda t: (
        ("FBW".index(t.kind), -t.part, -t.microbatch)
        if t.kind == "B"
        else ("FBW".index(t.kind), t.part, t.microbatch)
    ),
    # Microbatch after microbatch.
    lambda t: ("BFW".index(t.kind), t.microbatch, -t.part if t.kind == "B" else t.part),
)
_KEPT = 2
"""Hidden states that a part keeps: the residual stream and the output of attention, or its input and output."""


@dataclass(frozen=True)
class _Way:
    """The tasks of all microbatches: where they run, how long, and what they wait for."""

    times: PartTimes
    num_ranks: int
    num_layers: int
    num_microbatches: int
    place: Place
    defers: bool

    @property
    def last_part(self) -> int:
        return 2 * self.num_layers

    def rank(self, task: Task) -> int:
        layer, is_attention = divmod(task.part, 2)
        return self.place(layer, task.microbatch) if is_attention else layer % self.num_ranks

    def seconds(self, task: Task) -> float:
        t = self.times
        # The first part has only the norm before attention, which costs next to nothing.
        weights = t.qkv if task.part % 2 else (t.linear if task.part > 0 else 0.0)
        forward = weights + (t.attention if task.part % 2 else 0.0)
        if task.kind == "F":
            return forward
        if task.kind == "W":
            return weights
        attention = t.attention_backward if task.part % 2 else 0.0
        # Linear layers are computed again; attention is not.
        return 2 * weights + attention + (0.0 if self.defers else weights)

    def hop(self, task: Task) -> float:
        """Returns how long the results of a task travel, if they do."""
        # Hidden states and the residual stream; to attention its weights, and back their gradients.
        to_attention = task.kind == "F" and task.part % 2 == 0
        from_attention = task.kind == "B" and task.part % 2 == 1
        weights = self.times.weights_hop if to_attention or from_attention else 0.0
        return 2 * self.times.hidden_hop + weights

    def memory(self, task: Task) -> float:
        """Returns by how much a task changes the memory of its rank."""
        t = self.times
        pending = (t.qkv_pending if task.part % 2 else t.linear_pending) if task.part else 0.0
        kept = float(_KEPT if task.part else 0)
        if task.kind == "F":
            return kept
        return -pending if task.kind == "W" else (pending if self.defers else 0.0) - kept

    def next_of(self, task: Task) -> Iterator[Task]:
        kind, part, microbatch = task
        if kind == "F":
            last = part == self.last_part
            yield Task("B", part, microbatch) if last else Task("F", part + 1, microbatch)
        elif kind == "B":
            if part > 0:
                yield Task("B", part - 1, microbatch)
            if self.defers and part > 0:
                yield Task("W", part, microbatch)


def _simulate(way: _Way, order: Order, held: int) -> Helix:
    """Lets each rank run what is ready."""
    ready: list[list[tuple[tuple[int, ...], Task]]] = [[] for _ in range(way.num_ranks)]
    # Time, kind of event (what arrives before what is free), and a task or a rank.
    events: list[tuple[float, int, Task | int]] = []
    is_busy = [False] * way.num_ranks
    sent, memory, peak = [0.0] * way.num_ranks, [0.0] * way.num_ranks, 0.0
    admitted, under_way, now, done = 0, 0, 0.0, 0

    def admit() -> None:
        nonlocal admitted, under_way
        while admitted < way.num_microbatches and under_way < held:
            heapq.heappush(events, (now, 0, Task("F", 0, admitted)))
            admitted, under_way = admitted + 1, under_way + 1

    def finish(task: Task, rank: int) -> None:
        nonlocal under_way, done, peak
        done += 1
        memory[rank] += way.memory(task)
        peak = max(peak, memory[rank])
        for other in way.next_of(task):
            travels = other.kind != "W" and way.rank(other) != rank
            hop = way.hop(task) if travels else 0.0
            sent[rank] += hop
            heapq.heappush(events, (now + hop, 0, other))
        if task.kind == "B" and task.part == 0:
            under_way -= 1
            admit()

    running: dict[int, Task] = {}
    admit()
    while events:
        now, kind, what = heapq.heappop(events)
        if kind == 0:
            assert isinstance(what, Task)
            heapq.heappush(ready[way.rank(what)], (order(what), what))
        else:
            assert isinstance(what, int)
            is_busy[what] = False
            finish(running.pop(what), what)
        if events and events[0][0] == now:
            continue  # all that happens at this time, before ranks choose
        for rank, tasks in enumerate(ready):
            if tasks and not is_busy[rank]:
                task = running[rank] = heapq.heappop(tasks)[1]
                is_busy[rank] = True
                heapq.heappush(events, (now + way.seconds(task), 1, rank))
    parts = way.last_part + 1
    assert done == way.num_microbatches * (2 * parts + (parts - 1 if way.defers else 0))
    return Helix(now, peak, max(sent))
