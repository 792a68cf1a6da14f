# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates a table of pipeline actions: whether it deadlocks, how long it takes, and its memory.

Ranks run their actions in order, each as soon as its inputs have arrived. A transfer between ranks
(a hop) takes a fixed time, during which both ranks compute. A rank that waits for a gradient
recomputes checkpointed blocks meanwhile, if the costs give a time for the recomputation.
"""

from dataclasses import dataclass

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, Table


class TableError(ValueError):
    """A table that no pipeline can run. The message names the rank and the action."""


@dataclass(frozen=True)
class Simulation:
    """Times and memory of a table, in the units of the costs.

    For each rank, ``busy`` is the time in which it computes, ``spans`` the time from its first start to
    its last end, and ``peaks`` its largest memory.
    """

    starts: dict[Action, float]
    ends: dict[Action, float]
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.ends.values()) - min(self.starts.values())

    @property
    def bubble(self) -> float:
        """Share of the makespan during which the ranks are idle on average."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def span_bubble(self) -> float:
        """Largest idle share of a rank's span: the bubble if no rank waits for others between steps."""
        return max(1 - busy / span for busy, span in zip(self.busy, self.spans, strict=True))

    @property
    def peak(self) -> float:
        return max(self.peaks)


def simulate(table: Table, costs: Costs) -> Simulation:
    """Simulates a table. Raises TableError if it is not complete or an action would wait forever."""
    check_complete(table)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free_at = [0.0] * table.num_ranks
    positions = [0] * table.num_ranks
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, actions in enumerate(table.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                ready = ready_time(action, table, ends, costs.hop)
                if ready is None:
                    break
                # All earlier actions of this rank have ended: it waits for another rank's tensor.
                waits = max(0.0, ready - free_at[rank])
                starts[action] = free_at[rank] + waits - min(waits, costs.recompute(action))
                free_at[rank] = ends[action] = starts[action] + costs.time(action)
                positions[rank] += 1
                is_moving = True
    _check_finished(table, positions, ends)
    return Simulation(
        starts,
        ends,
        busy=tuple(sum(map(costs.time, actions)) for actions in table.actions),
        spans=tuple(
            ends[actions[-1]] - starts[actions[0]] if actions else 0.0 for actions in table.actions
        ),
        peaks=tuple(peak_memory(actions, costs, table) for actions in table.actions),
    )


def ready_time(action: Action, table: Table, ends: dict[Action, float], hop: float) -> float | None:
    """Returns the time at which an action's inputs have arrived; None if it is not known yet."""
    ready = 0.0
    for alternatives in action.after(table):
        end = next((ends[other] for other in alternatives if other in ends), None)
        if end is None:
            return None
        travels = table.rank(alternatives[0]) != table.rank(action)
        ready = max(ready, end + (hop if travels else 0.0))
    return ready


def peak_memory(actions: tuple[Action, ...], costs: Costs, table: Table) -> float:
    held = peak = 0.0
    for action in actions:
        change = costs.memory(action) - _shared(action, costs, table)
        # While an action runs, the memory that it allocates and that it frees are both held.
        peak = max(peak, held + max(change, 0.0))
        held += change
    return peak


def _shared(action: Action, costs: Costs, table: Table) -> float:
    """Returns by how much an action changes the memory that its stage shares with the previous stage."""
    size, stage = costs.stages[action.stage].shared, action.stage
    if size == 0 or stage == 0 or action.kind not in "FIB":
        return 0.0
    before = Action(stage - 1, "F", action.microbatch)
    if table.rank(before) != table.rank(action):
        return 0.0
    return size if action.kind == "F" else -size


def check_complete(table: Table) -> None:
    """Raises TableError unless each pass is in the table once, on the right rank."""
    listed: set[Action] = set()
    for rank, actions in enumerate(table.actions):
        for action in actions:
            if not 0 <= action.stage < table.num_stages or table.rank(action) != rank:
                raise TableError(f"Rank {rank} must not run {action}: it does not hold the stage.")
            if action in listed:
                raise TableError(
                    f"Rank {rank} must run {action} once, but the table lists it more than once."
                )
            is_gap = action.kind == "G"
            count = table.num_gap_microbatches if is_gap else table.num_microbatches
            if not 0 <= action.microbatch < count:
                raise TableError(
                    f"Rank {rank} must not run {action}: there are only {count} microbatches"
                    f"{' in gaps' if is_gap else ''}."
                )
            listed.add(action)
    for stage in range(table.num_stages):
        needed = [Action(stage, "F", microbatch) for microbatch in range(table.num_microbatches)]
        if stage in table.gap_stages:
            needed += [Action(stage, "G", number) for number in range(table.num_gap_microbatches)]
        for action in needed:
            if action not in listed:
                rank = table.rank(action)
                raise TableError(f"Rank {rank} must run {action}, which the table lacks.")
        for microbatch in range(table.num_microbatches):
            rank = table.rank(Action(stage, "F", microbatch))
            full, *halves = (Action(stage, kind, microbatch) for kind in ("B", "I", "W"))
            found = listed & {full, *halves}
            if table.is_forward_only and found:
                raise TableError(f"Rank {rank} must run no backward pass, got {min(found)}.")
            if not table.is_forward_only and found not in ({full}, set(halves)):
                raise TableError(
                    f"Rank {rank} must run either {full} or both {halves[0]} and {halves[1]}, but "
                    f"the table contains {len(found)} of these three actions."
                )


def _check_finished(table: Table, positions: list[int], ends: dict[Action, float]) -> None:
    for rank, actions in enumerate(table.actions):
        if positions[rank] < len(actions):
            action = actions[positions[rank]]
            missing = next(
                alternatives
                for alternatives in action.after(table)
                if not any(other in ends for other in alternatives)
            )
            holder = table.rank(missing[0])
            raise TableError(
                f"Rank {rank} would wait forever before {action}: it needs "
                f"{' or '.join(map(str, missing))} of rank {holder}, which comes later or never."
            )
