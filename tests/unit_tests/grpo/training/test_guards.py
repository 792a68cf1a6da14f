# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What guards find, decide, count and say."""

import dataclasses
import math

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.training.guards import GUARDS, Guards, GuardStopped, Verdict

NAMES = (
    "loss/total mismatch/kl loss/reference_kl policy/entropy policy/nll policy/approx_kl "
    "mismatch/effective_sample_size teacher/top_k_kl loss/policy loss/ptx"
)
METRICS = dict.fromkeys(NAMES.split(), 0.2)
# What trips each guard, and what the line says of it.
BAD = {
    "nonfinite": ({"grad_norm": math.nan}, "grad_norm is nan"),
    "grad_norm": (
        {"grad_norm": 41.0},
        "grad_norm is 41, above guards.grad_norm_factor = 20 times the median of the last 20 "
        "optimizer steps, 2",
    ),
    "entropy": (
        {"policy/entropy": 1e-4}, "policy/entropy is 0.0001, below guards.entropy_floor = 0.001"
    ),
    "mismatch_kl": ({"mismatch/kl": 0.6}, "mismatch/kl is 0.6, above guards.mismatch_kl_limit = 0.5"),
}  # fmt: skip


class Judge:
    """Guards of a run, the lines that they said, and the number of the next step."""

    def __init__(self, **settings) -> None:
        config = JobConfig()
        config.guards = dataclasses.replace(config.guards, **settings)
        self.lines: list[str] = []
        self.guards = Guards(config, self.lines.append)
        self.step = 0

    def __call__(self, grad_norm: float = 2.0, **changes) -> Verdict:
        self.step += 1
        return self.guards.judge(self.step, grad_norm, METRICS | changes)

    def rewards(self, *, are_equal: bool) -> Verdict:
        return self.guards.judge_rewards(self.step + 1, are_equal=are_equal)

    def count(self, name: str) -> float:
        return self.guards.metrics()[f"guards/{name}"]


def test_a_healthy_run_is_left_alone():
    judge = Judge()
    assert {judge() for _ in range(50)} == {Verdict.TAKE}
    assert judge(grad_norm=39.0) is Verdict.TAKE  # 20 times the median is too much
    assert judge.lines == []
    assert set(judge.guards.metrics()) == {f"guards/{name}" for name in (*GUARDS, "skipped")}
    assert set(judge.guards.metrics().values()) == {0.0}
    judge.guards.raise_if_stopped()


@pytest.mark.parametrize("action", ["skip", "stop", "warn", "off"])
@pytest.mark.parametrize("guard", BAD)
def test_each_guard_does_what_it_is_set_to(guard, action):
    judge = Judge(**{guard: action})
    for _ in range(20):
        judge()
    changes, found = BAD[guard]
    wanted = {"skip": Verdict.SKIP, "stop": Verdict.STOP}.get(action, Verdict.TAKE)
    assert judge(**changes) is wanted
    assert judge.count(guard) == (action != "off")
    assert judge.count("skipped") == (action == "skip")
    line = f"Guard at step 21: {found}. With guards.{guard} = '{action}' "
    if action == "stop":
        with pytest.raises(GuardStopped) as error:
            judge.guards.raise_if_stopped()
        assert str(error.value).startswith(line)
        assert judge.lines == []
    else:
        assert [text.startswith(line) for text in judge.lines] == [True] * (action != "off")
        assert judge() is Verdict.TAKE


UNSCORED = {
    "rollout/unscored_by_policy": 3.0, "rollout/unscored_by_service": 1.0, "rollout/unscored_by_function": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("action", ["stop", "warn", "off"])
def test_completions_without_a_reward_are_judged_by_their_fraction(action):
    judge = Judge(unscored=action, unscored_limit=0.2)
    for fraction in (0.2, 0.21, 0.1, 0.3, 0.2, 0.3, 0.1, 0.3):
        judge.guards.judge_unscored(7, UNSCORED | {"rollout/unscored_fraction": fraction})
        judge()
    judge.guards.judge_unscored(8, {})  # of a part of a batch
    assert judge.count("unscored") == 4 * (action != "off")
    lines = judge.lines if action != "stop" else [judge.guards.reason]
    assert len(lines) == {"warn": 3, "stop": 1, "off": 0}[action]  # the 1st, 2nd and 4th
    for line in lines:
        assert line.startswith("Guard at step 7: rollout/unscored_fraction is 0.")
        assert "guards.unscored_limit = 0.2 (completions unscored 3 by policy, 1 by service" in line


@pytest.mark.parametrize("action", ["skip", "stop", "warn"])
@pytest.mark.parametrize("name", METRICS)
def test_each_metric_of_the_loss_must_be_finite(name, action):
    wanted = {"skip": Verdict.SKIP, "stop": Verdict.STOP}.get(action, Verdict.TAKE)
    for value in (math.nan, math.inf, -math.inf):
        judge = Judge(nonfinite=action, mismatch_kl="off", entropy="off")
        assert judge.guards.judge(1, 1.0, METRICS) is Verdict.TAKE
        assert judge.guards.judge(2, 1.0, METRICS | {name: value}) is wanted
        assert judge.count("nonfinite") == 1
        found = [*judge.lines, judge.guards.reason or ""]
        assert f"{name} is {value}. With guards.nonfinite" in found[0]


def test_a_spike_is_ten_medians_and_is_described_where_the_guard_acts():
    judge = Judge()
    for _ in range(20):
        assert not judge.guards.is_spike(1000.0), "the window is not full"
        judge(grad_norm=0.5)
    norms = (5.0, 5.1, math.inf, math.nan)
    assert [judge.guards.is_spike(norm) for norm in norms] == [False, True, False, False]
    judge.guards.judge(21, 41.0, METRICS, "grad_norm 41, 99% of its square in output.weight")
    assert "0.5 (grad_norm 41, 99% of its square in output.weight). With guards" in judge.lines[0]


def test_a_policys_spike_is_not_described_in_the_critics_sentence():
    judge = Judge()
    for _ in range(20):
        judge(grad_norm=0.5, **{"critic/grad_norm": 50.0})
    both = METRICS | {"critic/grad_norm": 9000.0}
    judge.guards.judge(21, 5.1, both, "99% in output.weight")
    assert "critic/grad_norm is 9000" in judge.lines[0]
    assert "output.weight" not in judge.lines[0], "10 medians are a spike, 50 are the guard's limit"


def test_a_norm_that_is_not_clipped_is_no_spike():
    judge = Judge()
    for _ in range(20):
        judge(grad_norm=0.0)
    assert not judge.guards.is_spike(1.0)
    assert judge.guards.is_spike(1.1)


def test_a_critics_norm_has_a_median_of_its_own_and_its_loss_must_be_finite():
    judge = Judge(grad_norm="skip")
    for _ in range(20):
        assert judge(**{"critic/grad_norm": 50.0}) is Verdict.TAKE
    assert judge(**{"critic/grad_norm": 999.0}) is Verdict.TAKE
    assert judge(**{"critic/grad_norm": 1001.0}) is Verdict.SKIP
    assert "critic/grad_norm is 1001, above guards.grad_norm_factor = 20" in judge.lines[0]
    assert judge(**{"critic/loss": math.nan}) is Verdict.SKIP
    assert "critic/loss is nan" in judge.lines[1]
    assert judge(**{"critic/grad_norm": math.inf}) is Verdict.SKIP


def test_steps_of_a_critic_alone_do_not_count_as_gradients_of_0():
    judge = Judge(grad_norm="skip")
    nothing = METRICS | {"policy/entropy": 0.0, "critic/grad_norm": 5.0}
    for step in range(1, 21):
        assert judge.guards.judge(step, None, nothing) is Verdict.TAKE
    assert judge(grad_norm=30.0) is Verdict.TAKE


def test_metrics_that_say_nothing_bad_or_too_much():
    judge = Judge()
    judge.guards.judge(1, math.nan, dict.fromkeys(METRICS, math.nan))
    assert "Guard at step 1: loss/total is nan and grad_norm is nan. With guards" in judge.lines[0]
    # An infinite metric of the user's own loss is the user's to judge.
    own = METRICS | {"loss/largest_ratio": math.inf}
    assert Judge().guards.judge(1, 1.0, own) is Verdict.TAKE
    # An entropy that is not computed, 0, has not collapsed.
    none = METRICS | {"policy/entropy": 0.0}
    assert Judge(entropy="stop").guards.judge(1, 1.0, none) is Verdict.TAKE


def test_a_step_that_is_not_finite_does_not_enter_the_median():
    judge = Judge(grad_norm="skip", grad_norm_window=2)
    judge()
    judge(grad_norm=math.nan)
    assert judge(grad_norm=1000.0) is Verdict.TAKE  # the window holds one norm
    assert judge(grad_norm=1e6) is Verdict.SKIP


def test_the_median_follows_a_norm_that_has_risen_for_good():
    judge = Judge(grad_norm="warn")
    for _ in range(20):
        judge()
    for _ in range(20):
        judge(grad_norm=100.0)
    assert 0 < judge.count("grad_norm") < 20


def test_a_norm_that_is_not_clipped_is_never_too_large():
    judge = Judge(grad_norm="skip")
    for _ in range(20):
        judge(grad_norm=1e-4)
    assert [judge(grad_norm=norm) for norm in (0.9, 1.1)] == [Verdict.TAKE, Verdict.SKIP]


def test_warnings_come_at_doubling_distances_and_begin_anew_after_a_healthy_step():
    judge = Judge()
    for _ in range(10):
        judge(**BAD["entropy"][0])
    assert [int(line.split()[3][:-1]) for line in judge.lines] == [1, 2, 4, 8]
    judge()
    judge(**BAD["entropy"][0])
    assert len(judge.lines) == 5
    assert judge.count("entropy") == 11


def test_a_run_that_skips_without_end_is_stopped():
    judge = Judge()
    bad = {"loss/total": math.nan}
    for healthy in (judge, None):
        assert {judge(**bad) for _ in range(9)} == {Verdict.SKIP}
        assert healthy is None or healthy() is Verdict.TAKE
    assert judge(**bad) is Verdict.STOP
    with pytest.raises(GuardStopped, match="10 optimizer steps in a row were skipped"):
        judge.guards.raise_if_stopped()


@pytest.mark.parametrize(("action", "wanted"), [("skip", Verdict.SKIP), ("stop", Verdict.STOP)])
def test_equal_rewards_act_after_so_many_batches_in_a_row(action, wanted):
    judge = Judge(equal_rewards=action)  # observe.equal_rewards_steps is 5
    verdicts = [judge.rewards(are_equal=equal) for equal in (True,) * 4 + (False,) + (True,) * 5]
    assert verdicts == [Verdict.TAKE] * 9 + [wanted]
    assert judge.count("equal_rewards") == 1
    if action == "skip":
        assert judge() is Verdict.SKIP
        assert judge.rewards(are_equal=False) is Verdict.TAKE
        assert judge() is Verdict.TAKE


@pytest.mark.parametrize("action", ["stop", "warn", "off"])
def test_lost_servers_act_once_for_each_outage(action):
    judge = Judge(servers_lost=action)
    ends = [judge.guards.judge_servers(7, seconds) for seconds in (0.0, 59.9, 60.0, 61.0)]
    assert ends == [False, False, action == "stop", action == "stop"]
    assert judge.count("servers_lost") == (action != "off")
    assert len(judge.lines) == (action == "warn")
    if action == "warn":
        assert "taken work for 60 s. With" in judge.lines[0]
        judge.guards.judge_servers(8, 0.0)
        judge.guards.judge_servers(9, 72.0)
        assert judge.count("servers_lost") == 2


@pytest.mark.parametrize("functions", [[], ["exact_match"]])
def test_equal_rewards_of_a_replay_that_names_no_reward_are_not_judged(functions):
    config = JobConfig()
    config.guards = dataclasses.replace(config.guards, equal_rewards="stop")
    config.rollout = dataclasses.replace(config.rollout, replay="rollouts.jsonl")
    config.reward = dataclasses.replace(config.reward, functions=functions)
    guards = Guards(config, print)
    verdicts = {guards.judge_rewards(step, are_equal=True) for step in range(1, 10)}
    assert (Verdict.STOP in verdicts) == bool(functions)
