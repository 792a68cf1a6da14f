# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The notice that nothing is learned, and the causes that it names."""

import dataclasses

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.equal_rewards import EqualRewardsWatch, likely_causes


def config(**observe) -> JobConfig:
    made = JobConfig()
    made.reward.functions = ["rewards.py:short_and_right"]
    made.observe = dataclasses.replace(made.observe, **observe)
    return made


def step(fraction: float = 1.0, mean: float = 0.0, std: float = 0.0, cut: float = 0.0):
    names = ("reward/equal_groups_fraction", "reward/mean", "reward/std", "rollout/length_fraction")
    return dict(zip(names, (fraction, mean, std, cut), strict=True))


def notice_of(made: JobConfig, **metrics: float) -> str:
    return EqualRewardsWatch(made).update(step() | metrics, None) or ""


@pytest.mark.parametrize(
    ("observe", "fractions", "expected"),
    [
        ({}, [1.0] * 50, [5, 10, 20, 40]),
        # One group with two rewards starts the count again.
        ({}, [1.0] * 4 + [0.9] + [1.0] * 6, [10]),
        ({"equal_rewards_steps": 2}, [1.0] * 9, [2, 4, 8]),
        ({"equal_rewards_steps": 0}, [1.0] * 9, []),
    ],
)
def test_notices_come_after_some_steps_and_then_at_doubling_distances(observe, fractions, expected):
    watch = EqualRewardsWatch(config(**observe))
    found = [watch.update(step(fraction), None) is not None for fraction in fractions]
    assert [number for number, is_told in enumerate(found, start=1) if is_told] == expected


@pytest.mark.parametrize(
    ("fractions", "is_told"), [([1.0] * 3, True), ([0.5] * 3, False), ([1.0, 1.0, 0.5], False)]
)
def test_a_run_that_was_too_short_for_a_notice_gets_it_at_its_end(fractions, is_told):
    watch = EqualRewardsWatch(config())
    assert [watch.update(step(fraction), None) for fraction in fractions] == [None] * 3
    told = "No group of the last 3 steps had two different rewards; nothing is learned"
    notice = watch.end(None)
    assert told in (notice or "") if is_told else notice is None


def test_the_notice_names_metrics_settings_and_where_to_look():
    notice = notice_of(config(equal_rewards_steps=1))
    for part in (
        "reward/equal_groups_fraction", "reward.functions", "short_and_right", "reward/mean",
        "rollout.max_new_tokens", "rollout/length_fraction", 'completion[-1]["content"]',
        "rollout.temperature", "grpo.group_size", "samples.jsonl", "observe.print_samples",
    ):  # fmt: skip
        assert part in notice, part


def test_a_run_that_learns_from_something_else_is_not_said_to_learn_nothing():
    made = config(equal_rewards_steps=1)
    taught = {"teacher/reverse_kl": 0.3}  # a replay's file says so; teacher.urls is not set
    assert "rewards teach nothing" in notice_of(made, **taught)
    made.reward.functions = []
    assert notice_of(made, **taught) == ""
    made.teacher.coef = 0.0
    assert "nothing is learned" in notice_of(made, **taught)
    made = config(equal_rewards_steps=1)
    made.grpo = dataclasses.replace(made.grpo, entropy_coef=0.01)
    assert "two different rewards" in (notice := notice_of(made))
    assert "nothing is learned" not in notice


@pytest.mark.parametrize(
    ("steps", "is_chat", "first"),
    [
        ([step(mean=-0.2)] * 5, True, "lists of messages, not strings"),
        ([step(mean=-0.2)] * 5, False, "may not depend on the completion"),
        ([step(cut=0.99)] * 5, None, "rollout.max_new_tokens"),
        ([step(mean=1.0, cut=0.99)] * 5, False, "may not depend on the completion"),
        ([step(mean=0.9 + i / 100, std=0.1) for i in range(5)], False, "too easy or too hard"),
    ],
)
def test_the_cause_that_the_numbers_support_comes_first(steps, is_chat, first):
    causes = likely_causes(config(), steps, is_chat)
    assert first in causes[0]
    assert any("lists of messages" in cause for cause in causes) == (is_chat is not False)
