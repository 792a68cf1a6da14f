# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rollouts of a group are trained on, or why the whole group is not.

All filters are off by default. Dynamic sampling drops groups whose rewards are all equal, which
have no advantage, and refills the batch with other groups (DAPO, Yu et al. 2025,
https://arxiv.org/abs/2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.rewards.scoring_pool import ScoringFailed
from torchtitan.grpo.rollout.kept_groups import (
    EQUAL,
    FAILED,
    NOT_ACCEPTED,
    SCORING_FAILED,
    SHORT,
    TRUNCATED,
    UNRATED,
    UNSCORED,
    Cause,
)
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.teachers import TeacherPool, Unrated
from torchtitan.grpo.types import Generation, Prompt, Rollout


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


class Unusable(Exception):
    """The group is not trained on; the ledger records ``reason``.

    The message says more about it, and ``cause`` what to change if it happens to many groups.
    """

    def __init__(self, reason: CloseReason, detail: str, cause: Cause) -> None:
        super().__init__(detail)
        self.reason: CloseReason = reason
        self.cause = cause


class GroupJudge:
    """Filters, scores and rates the completions of one group at a time.

    ``waste`` is the budget of dynamic sampling, or ``None`` without it. A group needs
    ``fewest_rollouts``: two rewards for a group-relative advantage, one for an advantage
    relative to the batch.
    """

    def __init__(
        self,
        scorer: Scorer,
        completion_filter: CompletionFilter | None = None,
        waste: WasteBudget | None = None,
        fewest_rollouts: int = 2,
        teachers: TeacherPool | None = None,
    ) -> None:
        self._scorer = scorer
        self._filter = completion_filter or CompletionFilter()
        self._waste = waste
        self._teachers = teachers
        self._fewest = fewest_rollouts

    @property
    def num_equal_dropped(self) -> int:
        """Number of groups that were left out because all their rewards are equal."""
        return 0 if self._waste is None else self._waste.num_dropped

    async def judge(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        """Returns the rollouts of the group to train on, each with a reward and a rating.

        Raises:
            Unusable: If too few rollouts remain, no teacher rates them, or, with dynamic
                sampling, all rewards are equal.
            RewardError: If the reward functions cannot be used any more. The run must stop.
            TeachersFailing: If too many groups in a row got no rating. The run must stop.
        """
        if len(generations) < self._fewest:
            detail = self._too_few(
                len(generations), "came back whole from servers and environments"
            )
            raise Unusable("failed", detail, FAILED)
        kept = self._filter.keep(generations)
        if len(kept) < self._fewest:
            filters = "passed rollout.min_completion_tokens and rollout.drop_truncated"
            cause = TRUNCATED if self._filter.num_truncated(generations) else SHORT
            raise Unusable("filtered", self._too_few(len(kept), filters), cause)
        try:
            rollouts = await self._scorer.score(prompt, kept)
            scored = [rollout for rollout in rollouts if rollout.reward is not None]
            if len(scored) < self._fewest:
                detail = self._too_few(len(scored), f"of {len(rollouts)} got a reward")
                detail += (
                    " A function, or an environment, that gives none (None) leaves a completion out; "
                    "to say that it failed, give 0."
                )
                raise Unusable("unscored", detail, UNSCORED)
            accepted = await self._scorer.accepted(prompt, scored)
        except ScoringFailed as error:  # logged and counted by the pool
            raise Unusable("unscored", str(error), SCORING_FAILED) from error
        if len(accepted) < self._fewest:
            detail = self._too_few(len(accepted), "passed rollout.should_accept")
            raise Unusable("filtered", detail, NOT_ACCEPTED)
        if self._waste is not None and not is_informative(accepted) and self._waste.spend():
            raise Unusable(
                "filtered", "All its rewards are equal (rollout.dynamic_sampling is on).", EQUAL
            )
        if self._teachers is None:
            return accepted
        try:
            return await self._teachers.rate_group(accepted)
        except Unrated as error:
            raise Unusable("unrated", str(error), UNRATED) from error

    def describe(self) -> str:
        """Describes what waits for a rating; empty if nothing does."""
        return self._teachers.describe() if self._teachers is not None else ""

    def take_metrics(self) -> dict[str, float]:
        return self._teachers.take_metrics() if self._teachers is not None else {}

    def _too_few(self, number: int, what: str) -> str:
        return f"At least {self._fewest} completions are needed, but {number} {what}."

    def next_batch(self) -> None:
        if self._waste is not None:
            self._waste.next_batch()
