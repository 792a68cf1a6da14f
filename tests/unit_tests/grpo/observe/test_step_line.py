# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The line of a step: its fields, and its width whatever the numbers are."""

import random

from torchtitan.grpo.observe.console import dropped, long_line, short_line

METRICS = {
    "reward/mean": 0.51234, "policy/entropy": 0.5123, "rollout/completion_tokens_mean": 11.21,
    "staleness/mean_steps": 0.75, "staleness/max_steps": 2.0, "rollout/tokens_per_second": 12345.6,
    "time/trained_tokens_per_second": 9876.5, "time/wait_data_fraction": 0.45,
    "rollout/wait_trainer_fraction": 0.1,
}  # fmt: skip


def test_both_lines_have_each_field_once():
    assert short_line(12, 150, METRICS) == (
        "12/150 rew 0.512 ent 0.51 len 11.2 age 0.75 gen/trn 12k/9876 trn waits 45%"
    )
    line = long_line(12, 150, METRICS)
    for part in (
        "step  12/150", "reward 0.512", "entropy 0.512", "length 11.21", "staleness 0.75 (max 2)",
        "generated 12346 tok/s", "trained 9876 tok/s", "trainer waits 45%",
    ):  # fmt: skip
        assert part in line, (part, line)


def test_what_a_line_shows_depends_on_the_run():
    held_back = METRICS | {"rollout/wait_trainer_fraction": 0.8}
    assert short_line(1, 2, held_back).endswith("gen waits 80%")
    assert long_line(1, 2, held_back).endswith("rollouts wait 80%")
    lent = METRICS | {"lend/lent_seconds": 0.5, "time/step_seconds": 2.0}
    assert long_line(1, 2, lent).endswith("trainer waits 45%  devices lent 25%")
    replayed = {k: v for k, v in METRICS.items() if not k.startswith("rollout/tok")}
    assert short_line(1, 2, replayed).endswith("trn 9876/s")
    assert "generated" not in long_line(1, 2, replayed)
    # A run that a teacher alone teaches shows the divergence, and a supervised one its loss.
    taught = METRICS | {"teacher/reverse_kl": 0.12345, "reward/mean": 0.0, "reward/std": 0.0}
    assert short_line(12, 150, taught).startswith("12/150 kl 0.123 ent 0.51")
    assert "teacher kl 0.123" in long_line(12, 150, taught)
    assert short_line(12, 150, taught | {"reward/std": 0.1}).startswith("12/150 rew 0.000")
    metrics = {"loss/total": 0.6347, "sft/epoch": 0.0213, "time/trained_tokens_per_second": 651.2}
    assert short_line(1, 20, metrics) == "1/20 loss 0.635 epoch 0.021 trained 651.2 tok/s"
    assert long_line(1, 20, metrics).startswith("step  1/20  loss 0.635")


def test_the_line_names_what_the_trainer_waits_for():
    waits = METRICS | {"rollout/wait_rewards_fraction": 0.4, "rollout/wait_episodes_fraction": 0.02}
    times = {
        "rollout/scoring_seconds": 1.234, "reward/logged/judge_seconds": 1.1, "agent/own_seconds": 0.01,
        "environment/game/own_seconds": 0.5,
    }  # fmt: skip
    assert short_line(12, 150, waits).endswith(" rewards 45%")
    assert long_line(12, 150, waits | times).endswith(
        "trainer waits 45%  for rewards 40%  for episodes 2%  scoring 1.234 s  judge 1.100 s  "
        "environment/game 0.500 s"
    )
    episodes = METRICS | {"rollout/wait_episodes_fraction": 0.3}
    assert short_line(12, 150, episodes).endswith(" episodes 45%")
    assert short_line(12, 150, METRICS | {"rollout/wait_rewards_fraction": 0.2}).endswith(
        " trn waits 45%"
    )
    held_back = waits | {"rollout/wait_trainer_fraction": 0.8}
    assert short_line(12, 150, held_back).endswith(" gen waits 80%")


EXTREMES = (0.0, 1e-9, 0.00049, 0.0005, 0.9996, 9.9996, 99.96, 999.6, 9999.6, 123456.7, 99949.9,
            999949.9, 9.9996e8, 1.23e11, 9.99e14, 1e15, float("nan"), float("inf"))  # fmt: skip


def test_the_short_line_fits_into_80_columns_with_any_number():
    rng = random.Random(0)
    for _ in range(3000):
        metrics = {key: rng.choice(EXTREMES) for key in METRICS}
        metrics["reward/mean"] = rng.choice((*EXTREMES, 9.9e99)) * rng.choice((1, -1))
        metrics["time/wait_data_fraction"] = rng.choice((0.0, 0.999, 1.0))
        for cause in ("rewards", "episodes"):
            metrics[f"rollout/wait_{cause}_fraction"] = rng.choice((0.0, 0.5, 1.0))
        metrics["rollout/wait_trainer_fraction"] = rng.choice((0.0, 0.999, 1.0))
        steps = rng.choice((1, 9999, 123456, 9999999))
        line = short_line(rng.randint(1, steps), steps, metrics)
        assert len(line) < 80, line


def test_only_counts_that_are_not_zero_are_shown():
    assert dropped(METRICS) == ""
    counts = {"rollout/prompts_too_long": 2.0, "rollout/unscored_groups": 1.0}
    assert dropped(METRICS | counts | {"rollout/failed_groups": 0.0}) == (
        "dropped: 2 prompts too long, 1 groups unscored"
    )
