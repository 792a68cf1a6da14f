# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines what rank 0 receives from the rollout process: batches and evaluation results."""

from dataclasses import dataclass

from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import BatchPart, FinishReason, PromptProgress, RolloutGroup


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one trainer step, or one part of them.

    With ``rollout.stream`` a batch is delivered in several parts; otherwise it has one part,
    which is both the first and the last.

    Attributes:
        groups: Groups of this part, ordered by ``group_id``. All parts together hold
            ``grpo.prompts_per_step`` groups, and every rollout has a reward. The arrays are
            read-only. They are all zeros if the ranks fetch their rollouts themselves
            (``prompts.single_rank_load = false``).
        progress: Value for ``RolloutProcessConfig.progress`` of a run that resumes after this
            batch.
        closed: Prompts closed since the previous batch, with the reasons.
        metrics: Metrics under ``reward/`` and ``rollout/``.
        part: Which part of its batch this is. ``progress``, ``closed`` and ``metrics`` are valid
            only in the part that ends the batch.
    """

    groups: list[RolloutGroup]
    progress: PromptProgress
    closed: dict[int, CloseReason]
    metrics: dict[str, float]
    part: BatchPart


@dataclass(frozen=True)
class EvaluatedCompletion:
    """One scored completion of a held-out prompt.

    Attributes:
        text: The completion.
        score: What the set's function gave it.
        num_tokens: Its length, observations of an environment included.
        finish_reason: Why it ended. With ``length`` it was cut.
        oldest_version: Oldest policy version that generated one of its tokens.
        newest_version: The newest.
    """

    text: str
    score: float
    num_tokens: int
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class EvaluatedPrompt:
    """One held-out prompt with those of its completions that received a score.

    Attributes:
        index: Row of the prompt in its set.
        prompt: The prompt as text.
        completions: At least one.
    """

    index: int
    prompt: str
    completions: tuple[EvaluatedCompletion, ...]


@dataclass(frozen=True)
class SetResult:
    """The figures of one set of held-out prompts.

    Attributes:
        name: Name of the set.
        function: The function that scored it.
        score: Mean over the prompts of the mean over the completions of each.
        num_prompts: Number of prompts with a score.
        num_completions: Number of completions with a score.
        pass_at: For each k the mean of pass@k over the prompts.
        length_mean: Mean length of a completion, in tokens.
        length_max: Length of the longest completion, in tokens.
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

    Attributes:
        sets: One result for each set, at least one.
        version: Oldest policy version that generated a token of any completion.
        newest_version: The newest. If it is ``version``, one version has generated everything.
        mixed_fraction: Share of completions with a token of another version than ``version``.
        seconds: Wall time of the evaluation.
    """

    sets: tuple[SetResult, ...]
    version: int
    newest_version: int
    mixed_fraction: float
    seconds: float

    @property
    def score(self) -> float:
        """Mean of the sets' scores."""
        return sum(result.score for result in self.sets) / len(self.sets)

    @property
    def num_prompts(self) -> int:
        """Number of prompts with a score, over all sets."""
        return sum(result.num_prompts for result in self.sets)
