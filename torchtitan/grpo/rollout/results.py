# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Batches and evaluation results, which rank 0 receives from the rollout process."""

from dataclasses import dataclass

from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import BatchPart, FinishReason, PromptProgress, RolloutGroup


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one trainer step, or one part of them.

    With ``rollout.stream`` a batch is delivered in several parts; otherwise it has one part,
    which is both the first and the last. ``progress``, ``closed`` and ``metrics`` are valid
    only in the part that ends the batch.

    Attributes:
        groups: Groups of this part, ordered by ``group_id``. All parts together hold
            ``grpo.prompts_per_step`` groups, and every rollout has a reward. The arrays are
            read-only. They are all zeros if the ranks fetch their rollouts themselves
            (``prompts.single_rank_load = false``).
        progress: Value for ``RolloutProcessConfig.progress`` of a run that resumes after this
            batch.
        closed: Prompts closed since the previous batch, with the reasons.
        metrics: Metrics under ``reward/`` and ``rollout/``.
        part: Which part of its batch this is.
    """

    groups: list[RolloutGroup]
    progress: PromptProgress
    closed: dict[int, CloseReason]
    metrics: dict[str, float]
    part: BatchPart


@dataclass(frozen=True)
class EvaluatedCompletion:
    """One scored completion of a held-out prompt.

    ``num_tokens`` includes observations of an environment. The versions are those of its
    tokens.
    """

    text: str
    score: float
    num_tokens: int
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class EvaluatedPrompt:
    """One held-out prompt with those of its completions that received a score, at least one.

    ``index`` is the row of the prompt in its set.
    """

    index: int
    prompt: str
    completions: tuple[EvaluatedCompletion, ...]


@dataclass(frozen=True)
class SetResult:
    """The figures of one set of held-out prompts.

    Attributes:
        score: Mean over the prompts of the mean over the completions of each.
        num_prompts: Number of prompts with a score.
        num_completions: Number of completions with a score.
        pass_at: For each k the mean of pass@k over the prompts.
        cut_fraction: Share of completions that were cut at the longest allowed length.
        samples: The first prompts with their completions, ``kept_samples`` of them.
    """

    name: str
    function: str
    score: float
    num_prompts: int
    num_completions: int
    pass_at: dict[int, float]
    length_mean: float
    length_max: int
    cut_fraction: float
    samples: tuple[EvaluatedPrompt, ...]


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of one evaluation of all sets.

    ``version`` and ``newest_version`` are those of the oldest and newest token of any
    completion. ``mixed_fraction`` is the share of completions with a token of another version
    than ``version``.
    """

    sets: tuple[SetResult, ...]
    version: int
    newest_version: int
    mixed_fraction: float
    seconds: float

    @property
    def score(self) -> float:
        return sum(result.score for result in self.sets) / len(self.sets)

    @property
    def num_prompts(self) -> int:
        return sum(result.num_prompts for result in self.sets)
