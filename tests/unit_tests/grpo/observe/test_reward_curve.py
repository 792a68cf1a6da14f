# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The picture of a run, by what its axes hold, and its summary."""

import dataclasses
import json

import pytest

from torchtitan.grpo.job_config import JobConfig
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


def config() -> JobConfig:
    made = JobConfig()
    made.job = dataclasses.replace(made.job, description="GRPO on digits")
    made.model.hf_assets_path = "models/tiny"
    made.reward.functions = ["rewards.py:right", "think_answer_tags"]
    made.evaluation.path = "heldout.jsonl"
    return made


def step(number: int, staleness: float) -> dict[str, float]:
    return {
        "step": number, "reward/mean": number / 10, "reward/right": number / 20,
        "reward/think_answer_tags": 0.5, "staleness/max_steps": staleness,
        "staleness/mean_steps": staleness / 2,
    }  # fmt: skip


def test_the_picture_has_a_title_components_evaluations_and_staleness(tmp_path, figures):
    steps = [step(number, staleness=number % 3) for number in range(1, 13)]
    key = "evaluation/heldout/score"
    evaluations = [{"step": 0, key: 0.1}, {"step": 12, key: 0.9}]
    file = draw_reward_curve(tmp_path, steps, evaluations, config())
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


def test_a_single_reward_without_weight_is_drawn_once_and_the_folder_names_the_run(
    tmp_path, figures
):
    made = config()
    made.reward.functions = ["rewards.py:right"]
    made.job = dataclasses.replace(JobConfig().job, dump_folder="outputs/first")
    steps = [{**step(n, 0), "reward/right": n / 10} for n in (1, 2)]
    draw_reward_curve(tmp_path, steps, [], made)
    assert [line.get_label() for line in figures[0].axes[0].get_lines()] == ["right"]
    assert figures[0].get_suptitle() == "first"


def test_the_summary_is_written_and_means_skip_records_without_the_key(tmp_path):
    history = [{"step": step, "reward/mean": step / 10} for step in range(1, 13)]
    assert mean_over(history[-10:], "reward/mean") == pytest.approx(0.75)
    assert mean_over(history, "no/such") is None
    assert json.loads(write_summary(tmp_path, {"steps": 12}).read_text()) == {"steps": 12}
