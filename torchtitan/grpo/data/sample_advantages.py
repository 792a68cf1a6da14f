# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the advantages of a batch for the log of samples."""

from collections.abc import Sequence

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.step_plan import StepPlan
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.types import RolloutGroup


def advantages_of(
    groups: Sequence[RolloutGroup], plan: StepPlan, config: GRPO
) -> dict[int, list[float | None]]:
    """Returns the advantage of each rollout by ``group_id``, as every rank computes it.

    An advantage is None for a rollout that is not trained, and for every rollout if the KL
    penalty is part of the reward: the penalty is known only after the reference was evaluated.

    Args:
        groups: The groups that were planned.
        plan: Their plan.
        config: ``[grpo]``.
    """
    sizes = [len(group.rollouts) for group in groups]
    values: list[float | None] = [None] * sum(sizes)
    if config.kl_coef == 0 or config.kl_in != "reward":
        advantages = compute_advantages(
            plan.samples.rewards,
            plan.samples.group_ids,
            plan.samples.completion_lengths,
            kind=config.advantage,
            std=config.advantage_std,
            eps=config.advantage_eps,
            length_power=config.advantage_length_power,
        )
        for sequence in plan.sequences:
            if sequence.source >= 0:
                values[sequence.source] = float(advantages[sequence.sample_id])
    rest = iter(values)
    return {group.group_id: [next(rest) for _ in group.rollouts] for group in groups}
