# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes what an evaluation reports from its scored completions. The functions are pure."""

from collections.abc import Sequence
from statistics import fmean

from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.rollout.evaluation.pass_at_k import pass_at_k
from torchtitan.grpo.rollout.results import EvaluatedPrompt, SetResult


def summarize_set(
    name: str, settings: EvaluationSet, prompts: Sequence[EvaluatedPrompt]
) -> SetResult:
    """Returns the figures of one set.

    A prompt counts with the mean over its completions, so that a prompt of which some completions
    could not be scored counts like any other. For pass@k, prompts with fewer than k scored
    completions are left out; if there are no others, that figure is left out.

    Args:
        name: Name of the set.
        settings: Settings of the set.
        prompts: Prompts with at least one scored completion, at least one, in the order of the set.
    """
    completions = [completion for prompt in prompts for completion in prompt.completions]
    return SetResult(
        name=name,
        function=settings.function,
        score=fmean(fmean(c.score for c in prompt.completions) for prompt in prompts),
        num_prompts=len(prompts),
        num_completions=len(completions),
        pass_at={
            k: value
            for k in settings.pass_at
            if (value := _mean_pass_at(k, settings.pass_score, prompts)) is not None
        },
        length_mean=fmean(c.num_tokens for c in completions),
        length_max=max(c.num_tokens for c in completions),
        cut_fraction=fmean(c.finish_reason == "length" for c in completions),
        samples=tuple(prompts[: settings.kept_samples]),
    )


def _mean_pass_at(k: int, pass_score: float, prompts: Sequence[EvaluatedPrompt]) -> float | None:
    scores = [[c.score for c in prompt.completions] for prompt in prompts]
    of_prompts = [
        pass_at_k(len(of_prompt), sum(score >= pass_score for score in of_prompt), k)
        for of_prompt in scores
        if len(of_prompt) >= k
    ]
    return fmean(of_prompts) if of_prompts else None
