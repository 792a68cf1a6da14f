# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""HelixPipe's tables (https://arxiv.org/abs/2507.00394).

The stages are the parts of a model of L layers: part 2k holds the weights between the attention of
layer k - 1 and that of layer k, and is on rank k modulo p; part 2k + 1 is the attention of layer k.
Attention has no weights. The attention of successive microbatches is on successive ranks, so that a
microbatch does not wait for another one's attention, which takes most of the time of long rows.

As in the paper, up to twice as many microbatches as there are ranks are under way (a loop). Unlike
in the paper, a rank does not complete all forward passes of a loop before the first backward pass: it
runs whichever action is ready, by the priority that proves the fastest of several. The last part runs each
microbatch's backward pass before the next forward pass, so that only one microbatch has logits.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, StageCosts, Table

Order = Callable[[Action], tuple[int, ...]]
"""Returns the sort key of an action. A rank takes the ready action with the smallest key."""

_LOOP = 2
"""Number of microbatches under way, relative to the number of ranks."""
_IS_FORWARD = {"F": 1, "B": 0}

_ORDERS: tuple[Order, ...] = (
    # Backward passes come first, with the last microbatch first.
    lambda a: (_IS_FORWARD[a.kind], -a.microbatch if a.kind == "B" else a.microbatch, a.stage),
    # As above, with the forward passes of later parts first.
    lambda a: (_IS_FORWARD[a.kind], -a.microbatch if a.kind == "B" else -a.stage, a.microbatch),
    # Part after part.
    lambda a: (_IS_FORWARD[a.kind], -a.stage if a.kind == "B" else a.stage, a.microbatch),
    # As above, with forward passes first.
    lambda a: (-_IS_FORWARD[a.kind], -a.stage if a.kind == "B" else a.stage, a.microbatch),
    # Microbatch after microbatch.
    lambda a: (_IS_FORWARD[a.kind], a.microbatch, -a.stage if a.kind == "B" else a.stage),
)


def helix(
    num_ranks: int, num_microbatches: int, costs: Costs, *, is_forward_only: bool = False
) -> Table:
    """Tries several placements of attention and several orders, and returns the fastest table.

    ``costs`` has an entry for each part; the number of parts is odd.
    """
    assert len(costs.stages) % 2, f"a model of L layers has 2 L + 1 parts, got {len(costs.stages)}"
    tries = itertools.product((0, 1), (1, -1), _ORDERS)
    found = (
        _Ranks(num_ranks, num_microbatches, costs, offset, shift, order, is_forward_only).run()
        for offset, shift, order in tries
    )
    return min(found, key=lambda timed: timed[0])[1]


@dataclass
class _Ranks:
    """Simulates ranks that run actions as soon as they are ready."""

    num_ranks: int
    num_microbatches: int
    costs: Costs
    offset: int
    shift: int
    order: Order
    is_forward_only: bool
    now: float = 0.0
    begun: int = 0
    # Time, kind of event (arrivals come before ranks that become free), and an action.
    events: list[tuple[float, int, Action]] = field(default_factory=list)

    def run(self) -> tuple[float, Table]:
        """Returns the duration of the table, and the table."""
        self.table = self._table(((),) * self.num_ranks)
        self.orders: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        self.ready: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in self.orders]
        self.running: list[Action | None] = [None] * self.num_ranks
        at_once = self.num_microbatches if self.is_forward_only else _LOOP * self.num_ranks
        for _ in range(min(at_once, self.num_microbatches)):
            self._admit()
        while self.events:
            self.now, ends, action = heapq.heappop(self.events)
            if ends:
                self._finish(action)
            else:
                heapq.heappush(self.ready[self.table.rank(action)], (self.order(action), action))
            if self.events and self.events[0][0] == self.now:
                continue  # ranks choose after all events of this time
            for rank, ready in enumerate(self.ready):
                if ready and self.running[rank] is None:
                    self._begin(heapq.heappop(ready)[1])
        return self.now, self._table(tuple(tuple(order) for order in self.orders))

    def _table(self, actions: tuple[tuple[Action, ...], ...]) -> Table:
        # For attention, the rank is that of microbatch 0.
        parts = [divmod(part, 2) for part in range(len(self.costs.stages))]
        return Table(
            tuple((layer + self.offset * attends) % self.num_ranks for layer, attends in parts),
            self.num_microbatches,
            actions,
            self.is_forward_only,
            shifts=tuple(self.shift * attends for _, attends in parts),
        )

    def _admit(self) -> None:
        if self.begun < self.num_microbatches:
            heapq.heappush(self.events, (self.now, 0, Action(0, "F", self.begun)))
            self.begun += 1

    def _begin(self, action: Action) -> None:
        rank = self.table.rank(action)
        self.running[rank] = action
        self.orders[rank].append(action)
        heapq.heappush(self.events, (self.now + self.costs.time(action), 1, action))

    def _finish(self, action: Action) -> None:
        rank = self.table.rank(action)
        self.running[rank] = None
        for following in self._after(action):
            if following.stage == action.stage:
                self._begin(following)  # the last part's way back
                continue
            hop = self.costs.hop if self.table.rank(following) != rank else 0.0
            heapq.heappush(self.events, (self.now + hop, 0, following))
        if action.kind == "B" and action.stage == 0:
            self._admit()

    def _after(self, action: Action) -> Iterator[Action]:
        stage, kind, microbatch = action
        last = len(self.costs.stages) - 1
        if kind == "F" and stage < last:
            yield Action(stage + 1, "F", microbatch)
        elif kind == "F" and not self.is_forward_only:
            yield Action(stage, "B", microbatch)
        elif kind == "B" and stage > 0:
            yield Action(stage - 1, "B", microbatch)


def part_costs(
    num_layers: int,
    linear: tuple[float, float],
    attention: tuple[float, float],
    *,
    before: float = 0.2,
    hop: float = 0.0,
    recomputes: bool = True,
    kept: tuple[float, float] = (1.0, 1.0),
    shared: float = 0.0,
) -> Costs:
    """Returns the costs of a model's parts from those of one layer.

    Args:
        num_layers: Number of layers.
        linear: Time of F of the parts with weights, and of their I and W together.
        attention: Times of F and of the backward pass of attention.
        before: Share of a layer's products that come before its attention.
        hop: Time for what one part sends to the next.
        recomputes: Whether parts with weights are recomputed in their backward pass.
        kept: Memory of a part with weights, and of attention, for a microbatch.
        shared: Memory of the output of attention, which both a part with weights and attention keep.
    """
    again = linear[0] if recomputes else 0.0

    def weights(share: float, keeps: float) -> StageCosts:
        return StageCosts(
            share * linear[0], share * (again + linear[1]), 0.0,
            activation=keeps, pending=0.0, recompute=share * again, shared=shared,
        )  # fmt: skip

    middle = StageCosts(*attention, 0.0, activation=kept[1], pending=0.0)
    # The first and the last part share the work of a layer.
    parts = [weights(before, 0.0), middle]
    for _ in range(num_layers - 1):
        parts += [weights(1.0, kept[0]), middle]
    return Costs((*parts, weights(1.0 - before, kept[0])), hop)
