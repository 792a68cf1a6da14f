# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes what an evaluation reports from its scored completions. The functions are pure."""

import math
from collections.abc import Sequence
from statistics import fmean

from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.rollout.results import EvaluatedPrompt, SetResult


def summarize_set(
    name: str, settings: EvaluationSet, prompts: Sequence[EvaluatedPrompt]
) -> SetResult:
    """Returns the figures of one set, from its prompts with a scored completion.

    A prompt counts with the mean over its completions, so that a prompt of which some completions
    could not be scored counts like any other. For pass@k, prompts with fewer than k scored
    completions are left out; if there are no others, that figure is left out.
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


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` completions of a prompt passes.

    This is the unbiased estimator ``1 - C(n - c, k) / C(n, k)`` of Chen et al. (2021),
    https://arxiv.org/abs/2107.03374: of all choices of ``k`` among the ``n`` completions, the share
    that contains one of the ``c`` that passed.

    Example: of 4 completions 1 passed. Of the 6 pairs, 3 contain it, so pass@2 is 0.5.
    """
    assert 1 <= k <= num_samples and 0 <= num_passed <= num_samples, (num_samples, num_passed, k)
    # Python's integers are exact, and so is the quotient of two of any size.
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
