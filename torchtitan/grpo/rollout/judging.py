# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which rollouts of a group are trained on, or why the whole group is not.

All filters are off by default. Dynamic sampling drops groups whose rewards are all equal, so that
all advantages are 0, and refills the batch with other groups (DAPO, Yu et al. 2025,
https://arxiv.org/abs/2503.14476).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config import Rollout as RolloutSettings
from torchtitan.grpo.losses.advantages import are_equal
from torchtitan.grpo.rewards.scoring_pool import ScoringFailed
from torchtitan.grpo.rollout.environments import EnvironmentFailed
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
from torchtitan.grpo.system import spans
from torchtitan.grpo.types import CAUSES, Generation, Prompt, Rollout, separated


class Unusable(Exception):
    """The group is not trained on. ``cause`` says what to change if this happens to many groups."""

    def __init__(self, reason: CloseReason, detail: str, cause: Cause) -> None:
        super().__init__(detail)
        self.reason: CloseReason = reason
        self.cause = cause


@dataclass(frozen=True)
class Rules:
    """How the completions of one environment are scored and filtered."""

    scorer: Scorer
    settings: RolloutSettings


class GroupJudge:
    """Filters, scores and rates the completions of one group at a time, by its environment's rules.

    A group needs two rewards for a group-relative advantage, and one for an advantage relative
    to the batch. Dynamic sampling drops a limited number of groups for each batch. Otherwise a
    policy that solves every prompt, or none, would generate forever. ``num_equal_dropped`` is the
    number of groups that dynamic sampling has dropped in the whole run.
    """

    def __init__(
        self,
        rules: Mapping[str, Rules],
        settings: RolloutSettings,
        grpo: GRPO,
        teachers: TeacherPool | None = None,
    ) -> None:
        self._rules, self._teachers = dict(rules), teachers
        self._counts = Counter[str]()  # completions since the last batch
        self._fewest = min(2, grpo.group_size)
        self._most_dropped = 0
        if settings.dynamic_sampling:
            self._most_dropped = int(settings.dynamic_sampling_limit * grpo.prompts_per_step)
        self._num_dropped = 0  # for the batch that is being filled
        self.num_equal_dropped = 0
        self._scoring_seconds: list[float] = []
        self._num_scoring = 0

    async def judge(
        self,
        prompt: Prompt,
        generations: Sequence[Generation],
        environment: str = "",
        failures: Sequence[EnvironmentFailed] = (),
        collect: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Returns the rollouts of the group to train on, each with a reward and a rating.

        ``failures`` are the errors of those of the group's episodes that failed. ``collect`` is called
        with all rollouts, scored or not. Raises Unusable if the group is not trained on, and RewardError
        or TeachersFailing if the run must stop.
        """
        generations = separated(generations)
        self._counts["all"] += len(generations) + len(failures)
        scorer, settings = self._rules[environment].scorer, self._rules[environment].settings
        written = [replace(f.written, apart=()) for f in failures if f.written is not None]
        self._counts["service"] += len(failures) - len(written)
        unscorable = await scorer.unscorable(prompt, written) if written else []
        self._count(unscorable)
        collect(unscorable)
        valued = [rollout for rollout in unscorable if rollout.reward is not None]
        if len(generations) + len(valued) < self._fewest:
            what = "came back whole from servers and environments"
            raise Unusable("failed", self._too_few(len(generations), what), FAILED)
        whole = generations
        if settings.drop_truncated:
            whole = [each for each in generations if each.finish_reason != "length"]
        least = settings.min_completion_tokens
        kept = [each for each in whole if each.num_written >= least]
        if len(kept) + len(valued) < self._fewest:
            filters = "passed rollout.min_completion_tokens and rollout.drop_truncated"
            cause = SHORT if len(whole) == len(generations) else TRUNCATED
            raise Unusable("filtered", self._too_few(len(kept), filters), cause)
        rollouts = await self._score(scorer, prompt, kept) if kept else []
        collect(rollouts)
        rollouts += valued
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        if len(scored) < self._fewest:
            detail = (
                f"{self._too_few(len(scored), f'of {len(rollouts)} got a reward')} A function, an environment, "
                "or a program of [agent] that gives none (None, or no number as its last line of output) "
                "leaves a completion out; to say that it failed, give 0. "
                f"None came from {scorer.silent(rollouts)}."
            )
            raise Unusable("unscored", detail, UNSCORED)
        return await self._judged(scorer, prompt, scored)

    async def _score(self, scorer: Scorer, prompt: Prompt, kept: list[Generation]) -> list[Rollout]:
        begun = time.monotonic()
        self._num_scoring += 1
        try:
            with spans.span("rewards", "reward", group=prompt.group_id):
                rollouts = await scorer.score(prompt, kept)
        except ScoringFailed as error:  # logged and counted by the pool
            self._counts["service" if error.kind == "postponed" else "function"] += len(kept)
            raise Unusable("unscored", str(error), SCORING_FAILED) from error
        finally:
            self._num_scoring -= 1
            self._scoring_seconds.append(time.monotonic() - begun)
        self._count(rollouts)
        return rollouts

    async def _judged(self, scorer: Scorer, prompt: Prompt, scored: list[Rollout]) -> list[Rollout]:
        """Returns the accepted rollouts, with teachers' ratings. Raises Unusable if the group is dropped."""
        try:
            accepted = await scorer.accepted(prompt, scored)
        except ScoringFailed as error:  # they have rewards, so none counts as unscored
            raise Unusable("unscored", str(error), SCORING_FAILED) from error
        if len(accepted) < self._fewest:
            detail = self._too_few(len(accepted), "passed rollout.should_accept")
            raise Unusable("filtered", detail, NOT_ACCEPTED)
        rewards = np.array([rollout.reward for rollout in accepted], np.float64)
        if are_equal(rewards) and self._num_dropped < self._most_dropped:
            self._num_dropped += 1
            self.num_equal_dropped += 1
            detail = "All its rewards are equal (rollout.dynamic_sampling is on)."
            raise Unusable("filtered", detail, EQUAL)
        if self._teachers is None:
            return accepted
        try:
            with spans.span("teachers", "teacher", group=prompt.group_id):
                return await self._teachers.rate_group(accepted)
        except Unrated as error:
            raise Unusable("unrated", str(error), UNRATED) from error

    @property
    def is_scoring(self) -> bool:
        """Whether a group is being scored. Without teachers, a written group has nothing else to wait for."""
        return self._num_scoring > 0 or self._teachers is None

    def describe(self) -> str:
        """Describes which groups wait for rewards or for ratings. An empty string if none does."""
        rating = self._teachers.describe() if self._teachers is not None else ""
        scoring = [rules.scorer.describe() for rules in self._rules.values()]
        # Environments share the workers that score.
        return "; ".join(filter(None, [*dict.fromkeys(scoring), rating]))

    def take_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        left_out = {metric: float(counts[cause]) for cause, metric in CAUSES.items()}
        num_all = max(counts["all"], 1)
        seconds, self._scoring_seconds = self._scoring_seconds, []
        return (self._teachers.take_metrics() if self._teachers is not None else {}) | {
            **left_out,
            "rollout/scoring_seconds": fmean(seconds or [0.0]),
            "rollout/unscored_fraction": sum(left_out.values()) / num_all,
            "rollout/unscorable_fraction": counts["unscorable"] / num_all,
        }

    def _count(self, rollouts: Sequence[Rollout]) -> None:
        self._counts.update(r.unscored or "function" for r in rollouts if r.reward is None)
        self._counts["unscorable"] += sum(rollout.unscored == "policy" for rollout in rollouts)

    def _too_few(self, number: int, what: str) -> str:
        return f"At least {self._fewest} completions are needed, but {number} {what}."

    def next_batch(self) -> None:
        self._num_dropped = 0
