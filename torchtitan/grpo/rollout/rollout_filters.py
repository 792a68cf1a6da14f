# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which rollouts are worth training on. Pure.

Two kinds of filter, each off unless it is asked for: of single completions
(``rollout.min_completion_tokens``, ``rollout.drop_truncated``, ``rollout.should_accept``),
and of whole groups: ``rollout.dynamic_sampling`` leaves out groups whose rewards are all
equal, which have no advantage, and refills the batch with others (DAPO, Yu et al. 2025,
arXiv:2503.14476). What that may waste is bounded for each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.types import Generation, Rollout


@dataclass(frozen=True)
class CompletionFilter:
    """Of single completions, before they are scored.

    Attributes:
        min_tokens: Shorter ones are left out.
        drop_truncated: Those that were cut at their length limit are left out.
    """

    min_tokens: int = 0
    drop_truncated: bool = False

    def keep(self, generations: Sequence[Generation]) -> list[Generation]:
        """Those that pass, in order."""
        return [
            generation
            for generation in generations
            if generation.num_written >= self.min_tokens
            and not (self.drop_truncated and generation.finish_reason == "length")
        ]


def is_informative(rollouts: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group differ: with equal ones every advantage is 0."""
    rewards = {rollout.reward for rollout in rollouts}
    return len(rewards) > 1


class WasteBudget:
    """How many groups may still be left out for the batch that is being filled.

    Args:
        per_batch: Groups; beyond them groups are taken as they are, so that a policy that
            solves everything, or nothing, does not generate for ever.
    """

    def __init__(self, per_batch: int) -> None:
        self._per_batch = per_batch
        self._spent = 0

    def spend(self) -> bool:
        """Leaves one out, if that is within the budget."""
        if self._spent >= self._per_batch:
            return False
        self._spent += 1
        return True

    def next_batch(self) -> None:
        """A batch was taken."""
        self._spent = 0
