# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The sums of who waited for whom, and the causes with the settings that change them."""

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.phases import Phases
from torchtitan.grpo.observe.who_waits import _CAUSES, WhoWaits
from torchtitan.grpo.pipeline.pass_marks import PassTimes

A, B = "10.0.0.1:80", "10.0.0.2:80"
OF_ROLLOUTS = {
    *("generation", "concurrency", "tail", "slow_server", "stalled_server", "no_server"),
    *("bound", "buffer", "rewards", "judge", "teacher", "episodes", "lend"),
}


def step(waits: dict[str, float] | None = None, **wall: float) -> dict[str, float]:
    """A step's record: its time is the sum of ``wall``, which holds the ``waits``, of rollouts."""
    rollouts = sum((waits or {}).values())
    wall = {"rollouts": rollouts, **wall} if rollouts else wall
    return {
        "policy_version": 1.0,
        "wall/total_seconds": sum(wall.values()),
        **{f"wall/{cause}_seconds": seconds for cause, seconds in wall.items()},
        **{f"wait/{cause}_seconds": seconds for cause, seconds in (waits or {}).items()},
    }


def waits_of(*records: dict[str, float]) -> WhoWaits:
    waits = WhoWaits(JobConfig())
    for record in records:
        waits.add(record)
    return waits


@pytest.mark.parametrize("cause", [*_CAUSES, "unheard_of"])
def test_every_cause_is_a_sentence_that_names_its_settings_and_the_value_of_each(cause: str):
    record = step({cause: 3.0}, forward=1.0) if cause in OF_ROLLOUTS else step(forward=1.0)
    if cause == "training":
        record |= {"rollout/wait_trainer_fraction": 0.9}
    elif cause not in OF_ROLLOUTS:
        record = step(forward=1.0, **{cause: 3.0})
    (found,) = waits_of(record).causes()
    expected = (cause, 0.9) if cause == "training" else (cause, 0.75)
    assert (found["cause"], found["fraction"]) == expected
    row = _CAUSES.get(cause, _CAUSES["other"])
    assert found["setting"] == next(iter(row.settings), None)
    text = found["text"]
    assert text.startswith(f"{expected[1]:.0%} of the time of the steps waited for ")
    assert text.endswith(".") and "{" not in text
    assert all(setting in text for setting in row.settings)


def test_values_are_those_of_the_run_and_lists_are_left_out():
    config = JobConfig()
    config.reward.judge.max_concurrent = 5
    waits = WhoWaits(config)
    waits.add(step({"judge": 2.0, "slow_server": 1.0}, forward=1.0))
    judge, slow = waits.causes()
    assert judge["text"].endswith("raise reward.judge.max_concurrent (now 5).")
    assert (
        slow["text"].endswith("leave it out of inference.urls.")
        and slow["setting"] == "inference.urls"
    )


def test_causes_come_by_their_time_and_those_below_a_percent_are_left_out():
    waits = waits_of(
        step({"generation": 1.0, "rewards": 4.0}, forward=90.0, push=2.5, other=0.5),
        step({"rewards": 1.0}, forward=0.0, push=1.0),
    )
    assert [c["cause"] for c in waits.causes()] == ["rewards", "push", "generation"]
    assert [c["seconds"] for c in waits.causes()] == [5.0, 3.5, 1.0]
    assert sum(waits.summary()["trainer"].values()) == waits.summary()["seconds"] == 100.0
    assert waits.summary()["rollouts"] == {"rewards": 5.0, "generation": 1.0}


def test_waits_for_rollouts_that_nothing_explains_are_messages():
    waits = waits_of(step({"generation": 1.0}, forward=5.0) | {"wall/rollouts_seconds": 4.0})
    assert [(c["cause"], c["seconds"]) for c in waits.causes()] == [
        ("rollouts", 3.0),
        ("generation", 1.0),
    ]
    # The rollout process may have seen more than the trainer.
    waits = waits_of(step({"generation": 4.0}, forward=5.0) | {"wall/rollouts_seconds": 3.0})
    assert [c["cause"] for c in waits.causes()] == ["generation"]


def test_a_run_without_steps_has_no_causes():
    waits = WhoWaits(JobConfig())
    empty = {"seconds": 0, "trainer": {}, "rollouts": {}, "servers": {}}
    assert (waits.causes(), waits.summary()) == ([], empty)
    waits.add({"wall/total_seconds": 5.0, "wall/start_seconds": 5.0})
    assert waits.causes() == []
    assert waits.summary()["trainer"] == {"start": 5.0}


def test_the_start_of_a_resumed_run_is_time_of_the_run_and_not_of_its_steps():
    waits = waits_of(step({"tail": 1.0}, start=96.0, forward=3.0))
    (tail,) = waits.causes()
    assert (tail["cause"], tail["fraction"]) == ("tail", 0.25)
    assert waits.summary()["seconds"] == 100.0


def test_what_follows_the_last_step_is_in_the_sums():
    waits = waits_of(step(forward=3.0))
    waits.add({"wall/total_seconds": 2.0, "wall/export_seconds": 2.0})
    assert waits.summary()["trainer"] == {"forward": 3.0, "export": 2.0}


def test_a_busy_trainer_is_named_only_where_it_waits_for_nothing():
    busy = {"rollout/wait_trainer_fraction": 0.5}
    assert [c["cause"] for c in waits_of(step(forward=98.0, other=2.0) | busy).causes()] == [
        "training", "other",
    ]  # fmt: skip
    assert [c["cause"] for c in waits_of(step(forward=90.0, push=10.0) | busy).causes()] == ["push"]


def test_servers_shares_are_weighted_by_the_steps_time_and_add_up_to_1():
    shares = {f"servers/{A}/generating_fraction": 1.0, f"servers/{B}/lost_fraction": 1.0}
    later = {f"servers/{A}/idle_fraction": 1.0, f"servers/{B}/lost_fraction": 1.0}
    waits = waits_of(step(forward=3.0) | shares, step({"stalled_server": 1.0}) | later)
    assert waits.summary()["servers"] == {A: {"generating": 0.75, "idle": 0.25}, B: {"lost": 1.0}}
    assert f"the server {B}, which had stopped" in waits.causes()[0]["text"]


def test_a_limit_of_completions_says_how_long_servers_had_no_requests():
    shares = {f"servers/{A}/generating_fraction": 1.0, f"servers/{B}/idle_fraction": 0.5}
    shares |= {f"servers/{B}/generating_fraction": 0.5}
    (limit,) = waits_of(step({"concurrency": 1.0}) | shares).causes()
    assert (
        "although servers had no requests for 25% of the time; raise rollout.max" in limit["text"]
    )


def test_the_slow_server_is_named_with_its_factor():
    speeds = {f"servers/{A}/token_seconds": 0.01, f"servers/{B}/token_seconds": 0.04}
    shares = {f"servers/{url}/generating_fraction": 1.0 for url in (A, B)}
    (slow,) = waits_of(step({"slow_server": 1.0}) | speeds | shares).causes()
    assert f"the server {B}, which takes 4.0 times as long" in slow["text"]


@pytest.mark.parametrize(
    ("factors", "said"),
    [([1.02, 2.0, 1.04], "other ranks, none of which is slow in most steps; look at prompts.balance_batch"), ([2.0, 3.0, 1.5], "rank 3 took 2.0 times")],
)  # fmt: skip
def test_the_rank_that_was_slowest_most_often_is_named_if_it_is_slow(
    factors: list[float], said: str
):
    records = [
        step(forward=1.0, ranks=1.0) | {"ranks/slowest": rank, "ranks/slowest_factor": factor}
        for rank, factor in zip((3.0, 1.0, 3.0), factors, strict=True)
    ]
    assert said in waits_of(*records).causes()[0]["text"]


@pytest.mark.parametrize(
    ("factor", "setting", "said"),
    [
        (1.01, "pipeline_parallel_schedule", "although no rank is slow"),
        (1.5, "module_fqns_per_model_part", "rank 1 took 1.5 times as long"),
    ],
)
def test_ranks_of_a_pipeline_wait_in_its_gaps_or_for_the_stage_with_the_most_work(
    factor: float, setting: str, said: str
):
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = 2
    waits = WhoWaits(config)
    waits.add(step(forward=1.0, ranks=1.0) | {"ranks/slowest": 1.0, "ranks/slowest_factor": factor})
    (stages,) = waits.causes()
    assert (stages["cause"], stages["setting"]) == ("ranks", f"parallelism.{setting}")
    assert said in stages["text"]


def test_a_run_without_servers_waits_for_no_rollout_process():
    config = JobConfig()
    config.sft.path = "examples.jsonl"
    waits = WhoWaits(config)
    waits.add(step(forward=1.0, rollouts=1.0))
    text = "50% of the time of the steps waited for the next examples or recorded rollouts."
    assert [(c["text"], c["setting"]) for c in waits.causes()] == [(text, None)]


def test_phases_divide_the_time_without_a_rest():
    now = [0.0]
    phases = Phases(60.0, clock=lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    spend(1.0)
    phases.enter("waiting for rollouts")
    spend(2.0)
    phases.enter("forward and backward")
    spend(6.0)
    with phases.within("fence"):
        spend(0.5)
    spend(2.0)
    phases.enter("some phase")
    spend(0.25)
    assert phases.wall_metrics({"forward": 1.0, "backward": 2.0, "ranks": 1.0}) == {
        "wall/start_seconds": 1.0, "wall/rollouts_seconds": 2.0, "wall/fence_seconds": 0.5,
        "wall/forward_seconds": 2.0, "wall/backward_seconds": 4.0, "wall/ranks_seconds": 2.0,
        "wall/other_seconds": 0.25, "wall/total_seconds": 11.75,
    }  # fmt: skip
    # Nothing was measured, as where a step is not taken, or trains no token.
    for nothing in ({}, PassTimes().divided([0.0, 0.0])):
        phases.enter("forward and backward")
        spend(3.0)
        found = phases.wall_metrics(nothing)
        assert found == {"wall/forward_seconds": 3.0, "wall/total_seconds": 3.0}
