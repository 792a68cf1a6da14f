# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rollouts are worth training on. All filters are off by default.

Dynamic sampling drops groups whose rewards are all equal, which have no advantage, and refills
the batch with other groups (DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.types import Generation, Rollout


@dataclass(frozen=True)
class CompletionFilter:
    """Filters single completions before they are scored.

    Completions with fewer than ``min_tokens`` tokens are dropped, and with ``drop_truncated``
    those that reached their length limit.
    """

    min_tokens: int = 0
    drop_truncated: bool = False

    def keep(self, generations: Sequence[Generation]) -> list[Generation]:
        return [
            generation
            for generation in generations
            if generation.num_written >= self.min_tokens and not self._drops_truncated(generation)
        ]

    def num_truncated(self, generations: Sequence[Generation]) -> int:
        return sum(map(self._drops_truncated, generations))

    def _drops_truncated(self, generation: Generation) -> bool:
        return self.drop_truncated and generation.finish_reason == "length"


def is_informative(rollouts: Sequence[Rollout]) -> bool:
    """Returns whether the rewards of a group differ. Equal rewards give advantages of 0."""
    rewards = {rollout.reward for rollout in rollouts}
    return len(rewards) > 1


class WasteBudget:
    """Bounds how many groups may be dropped while one batch is filled.

    Further groups are used as they are. Otherwise a policy that solves every prompt, or none,
    would generate forever. ``num_dropped`` counts the dropped groups of the whole run.
    """

    def __init__(self, per_batch: int) -> None:
        self._per_batch = per_batch
        self._spent = 0
        self.num_dropped = 0

    def spend(self) -> bool:
        """Counts one dropped group. Returns ``False`` if the budget does not allow it."""
        if self._spent >= self._per_batch:
            return False
        self._spent += 1
        self.num_dropped += 1
        return True

    def next_batch(self) -> None:
        self._spent = 0
