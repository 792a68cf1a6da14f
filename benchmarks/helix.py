# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates HelixPipe's schedule (https://arxiv.org/abs/2507.00394) for `long_rows.py`.

The parts of a layer that have weights are on one rank, and successive layers are on successive
ranks. The attention of different microbatches is computed on different ranks at the same time, so
that one microbatch does not wait for the slow quadratic part of another. The parts before attention
send the hidden states to the rank that computes attention, and the parts after it receive them.

Three things are as in the paper: the partition, in which the projection of q, k and v is computed
beside attention, with weights that are sent there; the order, which is first in, last out, in loops
of twice as many microbatches as ranks; and the recomputation of everything but attention. Two
things differ from the paper, in HelixPipe's favor: a rank takes whatever task is ready, in the
best of several orders and placements, and weight gradients may be computed later. The embedding and
the output layer are left out, as they are for the other schedules.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class PartTimes:
    """Times of the parts of one layer for one microbatch, in seconds.

    F, I and W are the forward pass, the input gradient and the weight gradient.

    Attributes:
        linear: Time of F of the linear layers except q, k and v. I and W take the same time each.
        qkv: Time of F of the projection of q, k and v. I and W take the same time each.
        attention: Time of the forward pass of attention.
        attention_backward: Time of the backward pass of attention, which has no weights.
        hidden_hop: Time for sending one tensor of hidden states to another rank.
        weights_hop: Time for sending the weights of q, k and v to another rank.
        linear_pending: Memory of the factors of the linear layers' weight gradients, in tensors of
            hidden states.
        qkv_pending: Memory of the factors of the weight gradients of q, k and v, in the same unit.
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
    """One pass of one microbatch through one part of the model.

    Part 2k is what lies between the attention of two layers, and part 2k + 1 is attention.
    """

    kind: Literal["F", "B", "W"]
    part: int
    microbatch: int


Place = Callable[[int, int], int]
"""Returns the rank that computes the attention of a layer and a microbatch."""
Order = Callable[[Task], tuple[int, ...]]
"""Returns the sort key of a task. A rank takes the ready task with the smallest key."""


@dataclass(frozen=True)
class Helix:
    """A simulated schedule.

    Attributes:
        makespan: Time of the whole step.
        peak: Largest memory of a rank, in tensors of a microbatch's hidden states.
        sent: Longest time for which the link of one rank sends.
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
        held: Maximum number of microbatches that have begun and not finished.
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
    # Backward passes come first, with the last microbatch first; weight gradients come last.
    lambda t: ("BFW".index(t.kind), -t.microbatch if t.kind == "B" else t.microbatch, t.part),
    # As above, with the forward passes of later parts first.
    lambda t: ("BFW".index(t.kind), -t.microbatch if t.kind == "B" else 0, -t.part, t.microbatch),
    # Layer after layer.
    lambda t: (
        ("BFW".index(t.kind), -t.part, -t.microbatch)
        if t.kind == "B"
        else ("BFW".index(t.kind), t.part, t.microbatch)
    ),
    # As above, with forward passes before backward passes.
    lambda t: (
        ("FBW".index(t.kind), -t.part, -t.microbatch)
        if t.kind == "B"
        else ("FBW".index(t.kind), t.part, t.microbatch)
    ),
    # Microbatch after microbatch.
    lambda t: ("BFW".index(t.kind), t.microbatch, -t.part if t.kind == "B" else t.part),
)
_KEPT = 2
"""Number of tensors of hidden states that a part keeps: the residual stream and the output of
attention, or the input and the output of attention."""


@dataclass(frozen=True)
class _Way:
    """The tasks of all microbatches: their ranks, their durations, and the tasks they depend on."""

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
        # The first part consists of the norm before attention, whose time is negligible.
        weights = t.qkv if task.part % 2 else (t.linear if task.part > 0 else 0.0)
        forward = weights + (t.attention if task.part % 2 else 0.0)
        if task.kind == "F":
            return forward
        if task.kind == "W":
            return weights
        attention = t.attention_backward if task.part % 2 else 0.0
        # Linear layers are recomputed; attention is not.
        return 2 * weights + attention + (0.0 if self.defers else weights)

    def hop(self, task: Task) -> float:
        """Returns the time for sending the results of a task to another rank, if they are sent."""
        # Sent are hidden states, the residual stream, the weights of q, k and v on the way to
        # attention, and their gradients on the way back.
        to_attention = task.kind == "F" and task.part % 2 == 0
        from_attention = task.kind == "B" and task.part % 2 == 1
        weights = self.times.weights_hop if to_attention or from_attention else 0.0
        return 2 * self.times.hidden_hop + weights

    def memory(self, task: Task) -> float:
        """Returns the change of a rank's memory that a task causes."""
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
    """Simulates the schedule: each rank runs tasks as soon as they are ready."""
    ready: list[list[tuple[tuple[int, ...], Task]]] = [[] for _ in range(way.num_ranks)]
    # Time, kind of event (arrivals sort before ranks that become free), and a task or a rank.
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
            continue  # handles all events of this time before ranks choose tasks
        for rank, tasks in enumerate(ready):
            if tasks and not is_busy[rank]:
                task = running[rank] = heapq.heappop(tasks)[1]
                is_busy[rank] = True
                heapq.heappush(events, (now + way.seconds(task), 1, rank))
    parts = way.last_part + 1
    assert done == way.num_microbatches * (2 * parts + (parts - 1 if way.defers else 0))
    return Helix(now, peak, max(sent))
