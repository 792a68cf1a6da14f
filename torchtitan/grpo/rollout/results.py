# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Batches and evaluation results, which rank 0 receives from the rollout process."""

from dataclasses import dataclass, field

from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import BatchPart, FinishReason, PromptProgress, RolloutGroup


@dataclass(frozen=True)
class RolloutBatch:
    """The ``grpo.prompts_per_step`` groups of one step, or with ``rollout.stream`` one part of them.

    ``progress`` is where a run resumes after this batch. ``closed`` are the prompts closed since the
    previous batch, and ``rows`` says where the rows of these prompts are. These three and ``metrics`` are
    valid only in the part that ends a batch.

    The groups are ordered by ``group_id``, and every rollout has a reward. The arrays are read-only. They
    are zeros if the ranks fetch their rollouts themselves (``prompts.single_rank_load = false``).
    """

    groups: list[RolloutGroup]
    progress: PromptProgress
    closed: dict[int, CloseReason]
    metrics: dict[str, float]
    part: BatchPart
    rows: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluatedCompletion:
    """A completion with its score. ``num_tokens`` includes the observations of an environment."""

    text: str
    score: float
    num_tokens: int
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A held-out prompt, which is row ``index`` of its set, with its scored completions (at least one)."""

    index: int
    prompt: str
    completions: tuple[EvaluatedCompletion, ...]


@dataclass(frozen=True)
class SetResult:
    """The figures of one set of held-out prompts.

    Prompts and completions without a score do not count. ``score`` is the mean over the prompts of each
    prompt's mean over its completions. ``pass_at`` maps k to the mean of pass@k over the prompts.
    ``samples`` are the first prompts of the set.
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

    ``version`` is the oldest policy version that generated a token, and ``newest_version`` the newest.
    ``mixed_fraction`` is the share of completions with a token of another version than ``version``.
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
