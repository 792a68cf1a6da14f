# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.rollout.longest_first import LengthRanker, LongestFirst
from torchtitan.grpo.types import Prompt

VOCABULARY = 50_000
GROUP_SIZE = 8


def returned(window: int, lengths: list[float]) -> list[int]:
    order = LongestFirst(window, lambda prompt: lengths[prompt.group_id])
    coming, out = iter(range(len(lengths))), []
    for _ in range(len(lengths) // window * window):
        while (prompt := order.pop()) is None:
            order.push(Prompt(next(coming), "", np.zeros(1, np.int32), {}))
        out.append(prompt.group_id)
    return out


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 5), max_size=60))
def test_each_window_is_returned_whole_longest_first_and_stable(window: int, lengths: list[int]):
    out = returned(window, [float(length) for length in lengths])
    for start in range(0, len(out), window):
        part = out[start : start + window]
        assert sorted(part) == list(range(start, start + window))
        assert part == sorted(part, key=lambda i: (-lengths[i], i))


def test_the_example_of_the_docstring():
    assert returned(3, [5, 9, 7, 1, 2, 8]) == [1, 2, 0, 5, 4, 3]


class Task:
    """Prompts of words, each of which makes an answer longer or shorter.

    All answers grow by the factor ``drift`` over 1,000 groups.
    """

    def __init__(self, drift: float = 1.0) -> None:
        self.rng = np.random.default_rng(0)
        self.words = self.rng.choice(VOCABULARY, 60, replace=False)
        self.effects = self.rng.normal(0, 0.25, 60)
        self.template = self.rng.choice(VOCABULARY, 30, replace=False)
        self.drift, self.num_groups = drift, 0

    def prompt(self) -> tuple[Prompt, float]:
        chosen = self.rng.choice(60, 12)
        ids = np.concatenate([self.template, self.words[chosen]]).astype(np.int32)
        return Prompt(0, "", ids, {}), 5.0 + float(self.effects[chosen].sum())

    def lengths(self, mean_log: float) -> list[int]:
        grown = np.log(self.drift) * self.num_groups / 1000
        self.num_groups += 1
        logs = self.rng.normal(mean_log + grown, 0.5, GROUP_SIZE)
        return np.maximum(np.exp(logs), 1).astype(int).tolist()

    def teach(self, ranker: LengthRanker, num_groups: int) -> None:
        for _ in range(num_groups):
            prompt, mean_log = self.prompt()
            ranker.observe(prompt, self.lengths(mean_log))

    def spearman(self, ranker: LengthRanker) -> float:
        prompts = [self.prompt() for _ in range(300)]
        predicted = [ranker.predict(prompt) for prompt, _ in prompts]
        return rank_correlation(predicted, [mean_log for _, mean_log in prompts])


def rank_correlation(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_prompts_it_has_never_seen_are_ranked_by_their_words():
    assert LengthRanker(first_guess=77).predict(Task().prompt()[0]) == 77
    task = Task()
    ranker = LengthRanker(first_guess=100)
    task.teach(ranker, 100)
    assert task.spearman(ranker) > 0.5
    task.teach(ranker, 500)
    # Not 1: there are fewer buckets than words, and some share one.
    assert task.spearman(ranker) > 0.7
    assert ranker.skill > 0.4


def test_a_policy_that_changes_is_followed():
    task = Task(drift=4.0)
    ranker = LengthRanker(first_guess=100)
    task.teach(ranker, 1500)
    task.effects = -task.effects  # what was long is short now
    task.teach(ranker, 1500)
    assert task.spearman(ranker) > 0.5


def test_a_prompt_that_comes_again_is_known_by_its_former_answers():
    rng = np.random.default_rng(3)
    # The same words in another order, so that the words tell nothing.
    words = rng.choice(VOCABULARY, 10, replace=False)
    rows = [rng.permutation(words).astype(np.int32) for _ in range(200)]
    mean_logs = rng.normal(5, 0.8, len(rows))
    ranker = LengthRanker(first_guess=100)
    for epoch in range(3):
        for index in rng.permutation(len(rows)):
            prompt = Prompt(epoch * len(rows) + int(index), "", rows[index], {})
            logs = rng.normal(mean_logs[index], 0.5, GROUP_SIZE)
            ranker.observe(prompt, np.exp(logs).astype(int).tolist())
    predicted = [ranker.predict(Prompt(10**6, "", row, {})) for row in rows]
    assert rank_correlation(predicted, mean_logs.tolist()) > 0.8


def test_its_memory_is_bounded():
    ranker = LengthRanker(first_guess=1, max_prompts=3)
    for i in range(9):
        ranker.observe(Prompt(i, "", np.array([i], np.int32), {}), [5])
    assert len(ranker._history) == 3
