# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defines what rank 0 receives from the rollout process: batches and evaluation results."""

from dataclasses import dataclass

from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import BatchPart, PromptProgress, RolloutGroup


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
class EvaluationSample:
    """One held-out prompt with its greedy completion and its score."""

    prompt: str
    completion: str
    score: float


@dataclass(frozen=True)
class EvaluationResult:
    """The score of one evaluation on the held-out prompts.

    Attributes:
        score: Mean of ``evaluation.function`` over all scored prompts.
        num_prompts: Number of prompts that received a score.
        version: Oldest policy version that generated a token of any completion.
        seconds: Wall time of the evaluation.
        samples: All scored prompts, ``num_prompts`` in total.
    """

    score: float
    num_prompts: int
    version: int
    seconds: float
    samples: tuple[EvaluationSample, ...]
