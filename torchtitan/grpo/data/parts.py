# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Steps whose rollouts come in parts (``rollout.stream``). A whole step is one part."""

from collections.abc import Sequence

import numpy as np

from torchtitan.grpo.data.plan import StepPlan, staleness_metrics
from torchtitan.grpo.data.planner import NextStep, StepPlanner
from torchtitan.grpo.rollout.admission import part_size
from torchtitan.grpo.types import RolloutGroup


def split_groups(groups: Sequence[RolloutGroup], num_parts: int) -> list[Sequence[RolloutGroup]]:
    """A whole step's groups, in at most ``num_parts`` parts."""
    size = part_size(len(groups), num_parts)
    return [groups[begin : begin + size] for begin in range(0, len(groups), size)]


class PartPlanner:
    """Plans the parts of a step one by one.

    Args:
        planner: Plans each as if it were a step.
    """

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner
        self._parts: list[tuple[Sequence[RolloutGroup], StepPlan]] = []

    @property
    def groups(self) -> list[RolloutGroup]:
        """Of all parts of the step until now, by ``group_id``."""
        return sorted(
            (group for groups, _ in self._parts for group in groups), key=lambda g: g.group_id
        )

    def plan(
        self,
        groups: Sequence[RolloutGroup],
        *,
        is_first: bool,
        is_last: bool,
        step: int,
        version: int,
        num_ranks: int,
    ) -> NextStep:
        """Plans one part; see :class:`NextStep` and :meth:`StepPlanner.plan`."""
        if is_first:
            self._parts = []
        plan = self._planner.plan(groups, step=step, version=version, num_ranks=num_ranks)
        self._parts.append((groups, plan))
        metrics = metrics_of_parts(self._parts, version) if is_last else {}
        return NextStep(plan, metrics, is_first, is_last)


def metrics_of_parts(
    parts: Sequence[tuple[Sequence[RolloutGroup], StepPlan]], version: int
) -> dict[str, float]:
    """What a plan knows (:class:`StepPlan`), of a step that was planned in parts.

    Args:
        parts: The groups and the plan of each.
        version: What the ages of samples count from.
    """
    plans = [plan for _, plan in parts]
    rollouts = [r for groups, _ in parts for g in groups for r in g.rollouts]
    num_tokens = sum(plan.num_tokens for plan in plans)

    def mean(name: str, weights: Sequence[int]) -> float:
        values = [plan.metrics[name] for plan in plans]
        return float(np.average(values, weights=weights if any(weights) else None))

    return staleness_metrics([r for r in rollouts if r.reward is not None], version) | {
        "data/filtered_groups_fraction": mean(
            "data/filtered_groups_fraction", [len(groups) for groups, _ in parts]
        ),
        "data/max_over_mean_cost": mean("data/max_over_mean_cost", [p.num_tokens for p in plans]),
        "data/rows_per_rank": sum(plan.metrics["data/rows_per_rank"] for plan in plans),
        "data/padding_fraction": 1 - num_tokens / sum(plan.capacity for plan in plans),
    }
