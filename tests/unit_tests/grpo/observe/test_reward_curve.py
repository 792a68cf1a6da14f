# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The picture of a run, by what its axes hold, and its summary."""

import json

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.report import draw_reward_curve, mean_over, write_summary


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, which are otherwise closed after they are saved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    yield kept
    monkeypatch.undo()
    plt.close("all")


def test_the_picture_has_a_title_components_evaluations_and_staleness(tmp_path, figures):
    config = JobConfig()
    config.job.description, config.model.hf_assets_path = "GRPO on digits", "models/tiny"
    config.reward.functions = ["rewards.py:right", "think_answer_tags"]
    config.evaluation.path = "heldout.jsonl"
    steps = [
        {
            "step": n, "reward/mean": n / 10, "reward/right": n / 20, "reward/think_answer_tags": 0.5,
            "staleness/max_steps": n % 3, "staleness/mean_steps": n % 3 / 2,
        }
        for n in range(1, 13)
    ]  # fmt: skip
    key = "evaluation/heldout/score"
    evaluations = [{"step": 0, key: 0.1}, {"step": 12, key: 0.9}]
    file = draw_reward_curve(tmp_path, steps, evaluations, config)
    assert file.stat().st_size > 1000
    (figure,) = figures
    assert figure.get_suptitle() == "GRPO on digits"
    top, bottom = figure.axes
    curves = {line.get_label(): list(line.get_xdata()) for line in top.get_lines()}
    assert curves["held out: exact_match"] == [0, 12]
    assert {"reward (weighted sum)", "right", "think_answer_tags"} <= set(curves)
    low, high = bottom.get_ylim()
    ages = [age for line in bottom.get_lines() for age in line.get_ydata()]
    assert low < min(ages) and max(ages) < high


def test_each_environment_has_a_curve_of_its_own(tmp_path, figures):
    config = JobConfig()
    config.environments = {
        "sums": {"reward": {"functions": ["environment"]}},
        "words": {"reward": {"functions": ["exact_match"]}},
    }
    steps = [
        {"step": n, "reward/mean": 0.5, "reward/environment": 0.25, "reward/file/sums": n / 10}
        for n in range(3)
    ]
    steps[1]["reward/file/words"] = 0.75  # a batch may lack an environment
    draw_reward_curve(tmp_path, steps, [], config)
    top, _ = figures[0].axes
    curves = {line.get_label(): list(line.get_ydata()) for line in top.get_lines()}
    assert curves == {
        "reward (weighted sum)": [0.5] * 3, "environment": [0.25] * 3,
        "sums": [0, 0.1, 0.2], "words": [0.75],
    }  # fmt: skip


def test_the_summary_is_written_and_means_skip_records_without_the_key(tmp_path):
    history = [{"step": step, "reward/mean": step / 10} for step in range(1, 13)]
    assert mean_over(history[-10:], "reward/mean") == pytest.approx(0.75)
    assert mean_over(history, "no/such") is None
    assert json.loads(write_summary(tmp_path, {"steps": 12}).read_text()) == {"steps": 12}
