# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import logging
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from rollouts import rollout

from torchtitan.grpo.inference.client import LogprobsError, ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.observe.console import dropped
from torchtitan.grpo.rollout.drops import DropLog, kind_of_request, run_summary
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.rollout.process import Announcer
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.owner import CallFailed


def test_thousands_of_one_kind_are_announced_once() -> None:
    announced: list[str] = []
    drops = DropLog(announced.append)
    for i in range(5000):
        drops.record_scoring(CallFailed("mine.py:f raised KeyError", f"f raised, time {i}"))
    assert announced == ["First of the rewards that raised: f raised, time 0"]
    drops.record_scoring(CallFailed("timeout", "took longer"))
    drops.record_scoring(CallFailed("mine.py:f not finite", "nan"))
    scored = {"reward raised": 5000, "reward timed out": 1, "reward unusable": 1}
    assert drops.counts == scored
    announced.clear()
    for i in range(100):
        error = RouteError(f"server {i} answered 400: too long", 400)
        drops.record_request(f"http://server-{i}", error)
    assert (len(announced), drops.counts["request refused"]) == (3, 100)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RouteError("answered 400", 400), "request refused"),
        (RouteError("answered 503", 503), "request unanswered"),
        (RouteError("no connection"), "request unanswered"),
        (LogprobsError("null"), "logprobs unusable"),
        (ServerError("no ids"), "answer unusable"),
    ],
)
def test_requests_are_counted_by_what_became_of_them(error: ServerError, kind: str) -> None:
    assert kind_of_request(error) == kind


def test_metrics_count_since_the_last_batch_and_the_note_holds_what_is_not_zero() -> None:
    drops = DropLog(lambda text: None)
    drops.record("answer cut", "after 3 tokens", number=2)
    first = drops.take_metrics()
    assert first["rollout/answers_cut_by_a_server"] == 2
    assert dropped(first | {"rollout/filtered_groups": 4.0}) == (
        "dropped: 2 answers cut by a server, 4 groups filtered"
    )
    assert dropped(drops.take_metrics()) == ""
    assert run_summary({}) == ""
    assert run_summary({"failed": 3}).startswith("Dropped in this run: 3 groups failed")
    for reason in get_args(CloseReason):
        drops.record_closed(7, reason, "because.")
    assert dropped(drops.take_metrics()).count("1 ") == len(get_args(CloseReason))


def test_the_first_group_that_each_environment_loses_is_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    announced: list[str] = []
    drops = DropLog(announced.append)
    for group, environment in enumerate(("sums", "words", "sums")):
        drops.record_closed(group, "unscored", "It failed.", environment, f"a.jsonl:{group + 1}")
    assert [text.partition(": ")[2] for text in announced] == [
        "group 0 (a.jsonl:1) of environments.sums is not trained on. It failed.",
        "group 1 (a.jsonl:2) of environments.words is not trained on. It failed.",
    ]
    third = (
        "groups unscored: group 2 (a.jsonl:3) of environments.sums is not trained on. It failed."
    )
    assert caplog.messages == [third]


def test_a_dropped_groups_completions_without_a_reward_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    prompt = Prompt(5, "1", np.array([3], np.int32), {}, "train.jsonl:8")
    texts = {"a\nb": None, "kept": 0.5, "x" * 10_000: None}
    made = [replace(rollout(2, r), completion=t, unscored="function") for t, r in texts.items()]
    DropLog().log_unscored(prompt, made)
    first, last = caplog.messages
    assert first == "group 5 (train.jsonl:8), unscored by function: 'a\\nb'"
    assert len(last) < 600


def test_completions_without_a_reward_are_in_the_steps_line_and_in_the_summary_of_the_run() -> None:
    drops = DropLog(lambda text: None)
    drops.counts.update({"function": 48, "policy": 2})
    words = "2 completions unscored by policy, 48 completions unscored by function"
    assert dropped(drops.take_metrics()) == f"dropped: {words}"
    assert words in run_summary(drops.counts)


async def test_errors_that_any_module_logs_are_announced_and_warnings_are_not() -> None:
    announcer = Announcer()
    try:
        module = logging.getLogger("torchtitan.grpo.rollout.serving.supervisor")
        await asyncio.to_thread(module.error, "Restart %d follows", 1)
        module.warning("not for the user")
        announcer.announce("first of the losses")
        await wait_at_most(10, announcer.has_news)
        assert announcer.take() == [("Restart 1 follows", True), ("first of the losses", True)]
    finally:
        announcer.close()
