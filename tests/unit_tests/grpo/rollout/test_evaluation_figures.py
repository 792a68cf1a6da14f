# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import itertools

import pytest
from metric_page import undescribed

from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.observe.evaluation_records import (
    evaluation_lines,
    evaluation_metrics,
    sample_records,
)
from torchtitan.grpo.rollout.evaluator import pass_at_k, summarize_set
from torchtitan.grpo.rollout.results import (
    EvaluatedCompletion,
    EvaluatedPrompt,
    EvaluationResult,
)

SETTINGS = EvaluationSet(
    path="x.jsonl",
    num_samples=4,
    temperature=1.0,
    pass_at=[1, 2, 4],
)


def prompt(index: int, *scores: float, cut: int = 0) -> EvaluatedPrompt:
    """A prompt whose i-th completion has i + 1 tokens; the first ``cut`` of them were cut."""
    completions = (
        EvaluatedCompletion(f"text {i}", score, i + 1, "length" if i < cut else "stop", 3, 4)
        for i, score in enumerate(scores)
    )
    return EvaluatedPrompt(index, f"prompt {index}", tuple(completions))


PROMPTS = [
    prompt(0, 1.0, 0.0, 0.5, 0.4, cut=1),  # 1 of 4 passes: 1/4, 1/2, 1
    prompt(1, 0.0, 0.0, 0.0, 0.0),  # none
    prompt(2, 1.0, 1.0),  # two could not be scored: 1, 1
]


def test_prompts_count_alike_and_prompts_with_too_few_completions_not_at_all():
    found = summarize_set("digits", SETTINGS, PROMPTS)
    assert found.score == pytest.approx((1.9 / 4 + 0 + 1) / 3)
    assert (found.num_prompts, found.num_completions) == (3, 10)
    assert found.pass_at[1] == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert found.pass_at[2] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found.pass_at[4] == pytest.approx(1 / 2)
    assert found.length_mean == pytest.approx((10 + 10 + 3) / 10)
    assert (found.length_max, found.cut_fraction) == (4, 0.1)
    assert [sample.index for sample in found.samples] == [0, 1, 2]
    # A figure that no prompt has enough completions for is left out.
    assert summarize_set("digits", SETTINGS, PROMPTS[2:]).pass_at == {1: 1.0, 2: 1.0}


def test_all_that_is_reported_is_described_and_the_sets_score_is_their_mean():
    results = tuple(
        summarize_set(name, SETTINGS, [p]) for name, p in zip("ab", PROMPTS, strict=False)
    )
    result = EvaluationResult(results, version=3, newest_version=4, mixed_fraction=1.0, seconds=2.0)
    metrics = evaluation_metrics(result)
    assert undescribed(metrics) == []
    assert metrics["evaluation/score"] == pytest.approx((1.9 / 4 + 0) / 2)
    assert metrics["evaluation/a/pass_at_2"] == pytest.approx(1 / 2)
    assert metrics["evaluation/b/cut_fraction"] == 0
    records = list(sample_records(result))
    assert [(r["step"], r["set"], r["row"]) for r in records] == [(3, "a", 0), (3, "b", 1)]
    assert records[0]["completions"][0] == {
        "text": "text 0", "score": 1.0, "num_tokens": 1, "finish_reason": "length",
        "versions": [3, 4],
    }  # fmt: skip
    lines = list(evaluation_lines(result))
    assert lines[0].startswith("held-out a, exact_match at step 3: 0.475, pass@1 0.250")
    assert "100% of these completions have tokens of newer weights, of up to step 4" in lines[2]


def test_pass_at_k_is_the_share_of_all_choices_that_contain_a_completion_that_passed():
    for num_samples in range(1, 8):
        for num_passed in range(num_samples + 1):
            passed = [i < num_passed for i in range(num_samples)]
            for k in range(1, num_samples + 1):
                choices = list(itertools.combinations(passed, k))
                expected = sum(any(choice) for choice in choices) / len(choices)
                assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-14)
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)
