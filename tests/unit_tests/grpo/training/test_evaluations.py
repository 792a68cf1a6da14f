# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When a run evaluates, which server keeps its weights meanwhile, and that no step waits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.rollout.results import EvaluationResult, SetResult
from torchtitan.grpo.training import evaluations as module
from torchtitan.grpo.training.evaluations import Evaluations

SET = SetResult("heldout", "exact_match", 0.5, 1, 1, {}, 2.0, 2, 0.0, ())
RESULT = EvaluationResult((SET,), version=0, newest_version=0, mixed_fraction=0.0, seconds=1.0)


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog):
    """Whatever level another test of the same process has left to torchtitan's logger, the root."""
    caplog.set_level("WARNING")


def config(*arguments: str) -> JobConfig:
    given = (
        "--model.hf_assets_path=model --reward.functions=exact_match --inference.launch "
        "--prompts.path=owner/set --evaluation.path=heldout.jsonl --evaluation.interval=2"
    )
    return load_config([*given.split(), *arguments])


class Source:
    """Has a result once it is given one; counts how often it was waited for.

    ``lent`` are the versions for which devices were lent, with the number of requests before.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[int, list[str]]] = []
        self.result: EvaluationResult | None = None
        self.is_evaluating = self.is_refusing = False
        self.num_waits = 0
        self.lent: list[tuple[int, int]] = []

    def lend(self, version: int) -> None:
        self.lent.append((version, len(self.requests)))

    def request_evaluation(self, version: int, pinned: Sequence[str] = ()) -> bool:
        if self.is_refusing:
            return False
        self.is_evaluating = True
        self.requests.append((version, list(pinned)))
        return True

    def take_evaluation(self) -> EvaluationResult | None:
        taken, self.result = self.result, None
        self.is_evaluating = taken is None
        return taken

    def wait_evaluation(self, version: int) -> EvaluationResult | None:
        self.num_waits += 1
        self.is_evaluating = False
        return replace(RESULT, version=self.requests[-1][0])


class Pins:
    """A publisher whose servers are pinned in turn."""

    def __init__(self) -> None:
        self.calls: list[int | None] = []
        self.is_alone = False

    def pin(self, version: int | None) -> list[str]:
        self.calls.append(version)
        return self.pinned()

    def pinned(self) -> list[str]:
        is_none = self.is_alone or not self.calls or self.calls[-1] is None
        return [] if is_none else ["http://b"]


def make(*arguments: str) -> tuple[Evaluations, Source, Pins, list[tuple[int, int, int]]]:
    source: Any = Source()
    pins: Any = Pins()
    logged: list[tuple[int, int, int]] = []

    def log(step: int, result: EvaluationResult, counts: Mapping[str, int]) -> None:
        logged.append((step, result.version, counts["left_out"]))

    evaluations = Evaluations(config(*arguments), source, pins, log, source.lend)
    return evaluations, source, pins, logged


def test_between_steps_an_evaluation_is_begun_and_recorded_when_it_is_there():
    evaluations, source, pins, logged = make()
    assert evaluations.is_beside_training
    assert [step for step in range(1, 7) if evaluations.is_due(step)] == [2, 4, 6]
    evaluations.begin(2)
    evaluations.collect(3)
    evaluations.begin(4)  # the first one is still running
    assert (logged, evaluations.num_left_out) == ([], 1)
    source.result = replace(RESULT, version=2)
    evaluations.collect(5)
    evaluations.begin(6)
    assert logged == [(5, 2, 1)]
    assert source.requests == [(2, ["http://b"]), (6, ["http://b"])]
    assert pins.calls == [2, None, 6]
    assert source.num_waits == 0


def test_at_the_end_the_running_one_is_waited_for_and_its_server_released_before_the_last():
    evaluations, source, pins, logged = make()
    evaluations.begin(4)
    evaluations.finish(5)
    assert (logged, pins.calls) == ([(5, 4, 0)], [4, None])
    evaluations.run(5)
    assert logged[1:] == [(5, 5, 0)]
    assert source.requests[-1] == (5, [])
    assert source.lent == [(5, 1)], "devices are lent only for the one that the run waits for"


def test_a_server_is_not_kept_for_ever(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    evaluations, source, pins, _ = make("--evaluation.timeout_seconds=60")
    evaluations.begin(2)
    now[0] = 59.0
    evaluations.collect(3)
    assert pins.calls == [2]
    now[0] = 61.0
    evaluations.collect(4)
    evaluations.collect(5)
    assert pins.calls == [2, None]
    assert source.is_evaluating


def test_an_evaluation_whose_server_had_to_take_new_weights_is_begun_again(caplog):
    evaluations, source, pins, logged = make()
    evaluations.begin(2)
    pins.is_alone = True
    evaluations.collect(3)
    assert "because no other server takes any" in caplog.text
    assert evaluations.is_due(3) and source.is_evaluating
    evaluations.begin(3)  # takes the place of the first one
    assert source.requests == [(2, ["http://b"]), (3, [])]
    assert not evaluations.is_due(3)
    evaluations.collect(4)
    evaluations.begin(4)  # the usual one
    assert evaluations.counts() == {"left_out": 1, "begun_again": 1}
    source.result = replace(RESULT, version=3)
    evaluations.collect(5)
    assert logged == [(5, 3, 1)]


def test_a_result_that_is_there_is_recorded_although_its_server_had_to_take_new_weights():
    evaluations, source, pins, logged = make()
    evaluations.begin(2)
    pins.is_alone = True
    source.result = replace(RESULT, version=2)
    evaluations.collect(3)
    assert logged == [(3, 2, 0)]
    assert not evaluations.is_due(3)
    assert evaluations.counts()["begun_again"] == 0


def test_a_refused_evaluation_keeps_no_server_and_is_requested_again_after_each_step(caplog):
    evaluations, source, pins, _ = make()
    source.is_refusing = True
    evaluations.begin(2)
    assert pins.calls == [2, None]
    evaluations.collect(3)
    assert evaluations.is_due(3)
    evaluations.begin(3)
    assert caplog.text.count("could not be requested") == 1
    source.is_refusing = False
    evaluations.collect(4)
    evaluations.begin(4)
    assert source.requests == [(4, ["http://b"])]
    assert not evaluations.is_due(5)
    assert evaluations.num_left_out == 0


def test_no_server_is_kept_unless_asked_for():
    evaluations, source, pins, _ = make("--evaluation.no-pin")
    evaluations.begin(2)
    assert (source.requests, pins.calls) == ([(2, [])], [])


@pytest.mark.parametrize("argument", ["--grpo.no-async_weight_update", "--rollout.deterministic"])
def test_where_figures_must_not_depend_on_time_the_run_waits(argument: str):
    extra = ["--rollout.max_head_offpolicyness=0"] if "deterministic" in argument else []
    evaluations, *_ = make(argument, *extra)
    assert not evaluations.is_beside_training


@pytest.mark.parametrize("argument", ["--evaluation.path=none", "--sft.path={}/examples.jsonl"])
def test_without_held_out_prompts_or_servers_nothing_is_due(argument, tmp_path):
    (tmp_path / "examples.jsonl").touch()
    evaluations, source, _, _ = make(argument.format(tmp_path))
    assert not evaluations.is_due(2)
    evaluations.run(2)
    assert source.requests == []
