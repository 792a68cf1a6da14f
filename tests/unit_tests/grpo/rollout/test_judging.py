# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import contextlib
import http.client
import io
import json
import shutil
import socket
import ssl
import tarfile
import urllib.error
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import pytest
import requests
import rollouts
from rollouts import generation

from torchtitan.grpo import config
from torchtitan.grpo.rewards.scoring_pool import ScoringFailed
from torchtitan.grpo.rollout.environments import EnvironmentFailed
from torchtitan.grpo.rollout.judging import GroupJudge, Rules, Unusable
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.system.functions import failure_kind
from torchtitan.grpo.types import Generation, Prompt, Rollout

PROMPT = Prompt(0, "1", np.array([3], np.int32), {})
THREE = [generation(2)] * 3


class GivenRewards(Scorer):
    """Scores the completions of a group with given rewards, and accepts given ones."""

    _names = ()

    def __init__(self, rewards: Sequence[float | None], accepts: Sequence[bool]) -> None:
        self.rewards, self.accepts = rewards, accepts

    async def score(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        return [
            rollouts.rollout(len(generation.token_ids), reward)
            for generation, reward in zip(generations, self.rewards, strict=False)
        ]

    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [r for r, accept in zip(rollouts, self.accepts, strict=False) if accept]


def make_judge(
    rewards: Sequence[float | None],
    accepts: Sequence[bool] = (True,) * 3,
    *,
    group_size: int = 3,
    **settings: Any,
) -> GroupJudge:
    grpo = config.GRPO(group_size=group_size, prompts_per_step=1)
    rollout = config.Rollout(**settings)
    return GroupJudge({"": Rules(GivenRewards(rewards, accepts), rollout)}, rollout, grpo)


class Valued(GivenRewards):
    """Gives what the policy wrote in failed episodes the value of ``unscorable_value``."""

    async def unscorable(self, prompt: Prompt, written: Sequence[Generation]) -> list[Rollout]:
        value = self.unscorable_value
        return [replace(rollouts.rollout(2, value), unscored="policy") for _ in written]


def failure(kind: str) -> EnvironmentFailed:
    failed = EnvironmentFailed(kind, "It failed.")
    failed.blame(generation(2))
    return failed


def judged(group_judge: GroupJudge, generations: Sequence[Generation]) -> list[Rollout]:
    return asyncio.run(group_judge.judge(PROMPT, generations))


def test_as_many_rollouts_as_are_compared_are_enough():
    assert [r.reward for r in judged(make_judge([1.0, None, 0.0]), THREE)] == [1.0, 0.0]
    assert len(judged(make_judge([1.0], group_size=1), [generation(2)])) == 1


ONE_LONG = [generation(4), generation(1), generation(1)]
TOO_FEW = {
    "one completion": ([generation(2)], [[1.0]], {}, "failed"),
    "none": ([], [[]], {"group_size": 1}, "failed"),
    "one that passes the filter": (ONE_LONG, [[1.0]], {"min_completion_tokens": 2}, "filtered"),
    "one with a reward": (THREE, [[None, 1.0, None]], {}, "unscored"),
    "one that is accepted": (THREE, [[1.0, 0.0, 1.0], (True, False, False)], {}, "filtered"),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_too_few_are_unusable(case):
    generations, arguments, settings, reason = TOO_FEW[case]
    with pytest.raises(Unusable) as raised:
        judged(make_judge(*arguments, **settings), generations)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("rewards", "accepts"),
    [([1.0, None, 0.0], (True,) * 3), ([1.0, 0.5, 0.0], (True, False, True)), ([None] * 3, ())],
)
def test_what_is_left_out_is_collected_also_of_a_group_that_is_not_trained_on(rewards, accepts):
    found: list[Rollout] = []
    with contextlib.suppress(Unusable):
        asyncio.run(make_judge(rewards, accepts).judge(PROMPT, THREE, "", (), found.extend))
    assert [one.reward for one in found] == rewards


def test_equal_rewards_are_dropped_until_the_budget_of_the_batch_is_spent():
    judge = make_judge([1.0, 1.0, 1.0], dynamic_sampling=True, dynamic_sampling_limit=1)
    for turn in (1, 2):
        with pytest.raises(Unusable, match="All its rewards are equal"):
            judged(judge, THREE)
        assert len(judged(judge, THREE)) == 3
        assert judge.num_equal_dropped == turn
        judge.next_batch()


def test_rewards_that_are_equal_up_to_rounding_have_no_advantage():
    judge = make_judge([0.1 + 0.2, 0.3, 0.3], dynamic_sampling=True)
    with pytest.raises(Unusable, match="All its rewards are equal"):
        judged(judge, THREE)


@pytest.mark.parametrize(("value", "kept"), [(None, [1.0]), (0.0, [1.0, 0.0])])
def test_completions_without_a_reward_are_counted_by_cause(value, kept):
    scorer = Valued([1.0, None], (True,) * 3)
    scorer.unscorable_value = value
    grpo = config.GRPO(group_size=1, prompts_per_step=1)
    judge = GroupJudge({"": Rules(scorer, config.Rollout())}, config.Rollout(), grpo)
    failures = [failure("raised KeyError"), failure("timeout")]
    found = asyncio.run(judge.judge(PROMPT, THREE[:2], "", failures))
    assert [rollout.reward for rollout in found] == kept
    metrics = judge.take_metrics()
    assert metrics.pop("rollout/scoring_seconds") > 0
    assert metrics == {
        "rollout/unscored_by_policy": float(value is None),
        "rollout/unscored_by_service": 1.0,
        "rollout/unscored_by_function": 1.0,
        "rollout/unscored_fraction": 0.75 if value is None else 0.5,
        "rollout/unscorable_fraction": 0.25,
    }
    assert set(judge.take_metrics().values()) == {0.0}


class FailingToScore(GivenRewards):
    async def score(self, prompt: Prompt, generations: Sequence[Generation]) -> list[Rollout]:
        raise ScoringFailed(PROMPT, "postponed", "The judge is away.")


class FailingToAccept(GivenRewards):
    async def accepted(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        raise ScoringFailed(PROMPT, "raised", "should_accept raised.")


GIVEN_UP: dict[str, tuple[Scorer, int, int, dict[str, float]]] = {
    "not scored": (FailingToScore([], ()), 3, 1, {"by_service": 4.0, "fraction": 1.0}),
    "not accepted": (FailingToAccept([0.0, 0.5, 1.0], ()), 3, 1, {"by_service": 1.0, "fraction": 0.25}),
    "too few came back": (GivenRewards([], ()), 1, 3, {"by_service": 3.0, "fraction": 0.75}),
    "too few rewards": (GivenRewards([None, 1.0, None], ()), 3, 0, {"by_function": 2.0, "fraction": 2 / 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN_UP)
def test_completions_of_a_group_that_is_given_up_count_once(case):
    scorer, num_whole, num_failed, expected = GIVEN_UP[case]
    grpo = config.GRPO(group_size=2, prompts_per_step=1)
    judge = GroupJudge({"": Rules(scorer, config.Rollout())}, config.Rollout(), grpo)
    with pytest.raises(Unusable):
        asyncio.run(judge.judge(PROMPT, THREE[:num_whole], "", [failure("timeout")] * num_failed))
    metrics = judge.take_metrics()
    assert (metrics.pop("rollout/scoring_seconds") > 0) == (case != "too few came back")
    found = {
        key.removeprefix("rollout/unscored_"): value for key, value in metrics.items() if value
    }
    assert found == expected


def test_a_group_whose_episodes_all_failed_is_trained_on_with_the_value_alone():
    scorer = Valued([], (True,) * 3)
    grpo = config.GRPO(group_size=2, prompts_per_step=1)
    judge = GroupJudge({"": Rules(scorer, config.Rollout())}, config.Rollout(), grpo)
    failures = [failure("exit status 1")] * 2
    with pytest.raises(Unusable) as raised:
        asyncio.run(judge.judge(PROMPT, [], "", failures))
    assert raised.value.reason == "failed"
    scorer.unscorable_value = 0.0
    assert len(asyncio.run(judge.judge(PROMPT, [], "", failures))) == 2


BLAMED = {
    "raised KeyError": True, "bad reward": True, "bad observation": True, "exit status 1": True, "exit status 139": True,
    "exit status -11": True, "exit status -24": True, "exit status -9": False, "exit status 137": False,
    "exit status 75": False, "exit status 127": False, "outside: TimeoutError": False, "reset raised KeyError": False,
    "timeout": False, "crash": False, "start": False, "column": False, "no request": False, "diverged": False,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "is_policys"), BLAMED.items())
def test_the_policy_is_blamed_for_what_crashes_and_not_for_services_and_machines(kind, is_policys):
    assert (failure(kind).written is not None) == is_policys


ASKED = httpx.Request("GET", "http://127.0.0.1")


def refused_with(status: int) -> Exception:
    return httpx.HTTPStatusError("", request=ASKED, response=httpx.Response(status))


def answered(status: int) -> Exception:
    return openai.APIStatusError("", response=httpx.Response(status, request=ASKED), body=None)


def asked_by_requests(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


def of_aiohttp(status: int) -> Exception:
    return aiohttp.ClientResponseError(None, (), status=status)  # pyright: ignore


def of_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("u", status, "m", http.client.HTTPMessage(), io.BytesIO())


class Hostile(Exception):
    @property
    def status(self) -> int:
        raise KeyError("status")


OUTSIDE = [
    aiohttp.ServerDisconnectedError(), aiohttp.ClientOSError(104, "reset"), aiohttp.ClientPayloadError(),
    aiohttp.ClientError(), aiohttp.ServerTimeoutError(), urllib.error.URLError("x"), http.client.RemoteDisconnected(""),
    http.client.IncompleteRead(b""), http.client.BadStatusLine(""), socket.gaierror(-3, "x"), socket.herror(),
    ssl.SSLEOFError(), BrokenPipeError(), BlockingIOError(11, "fork"), OSError(24, "x"), MemoryError(),
    RuntimeError("can't start new thread"), httpx.ReadError(""), httpx.WriteError(""), httpx.RemoteProtocolError(""),
    httpx.PoolTimeout(""), httpx.ProxyError(""), requests.exceptions.ChunkedEncodingError(),
    requests.exceptions.SSLError(), openai.APIConnectionError(request=ASKED), openai.APIError("", ASKED, body=None),
    ExceptionGroup("tasks", [KeyError(), ExceptionGroup("inner", [ConnectionResetError()])]),
    *(of(status) for of in (refused_with, answered, asked_by_requests, of_aiohttp, of_urllib) for status in (429, 503)),
]  # fmt: skip
OF_CODE = [
    KeyError("Timeout"), FileNotFoundError(2, "x"), PermissionError(13, "x"), shutil.SameFileError(), RecursionError(),
    tarfile.ReadError(), io.UnsupportedOperation(), json.JSONDecodeError("x", "", 0), UnicodeDecodeError("utf-8", b"", 0, 1, ""),
    aiohttp.InvalidURL("x"), httpx.UnsupportedProtocol(""), httpx.LocalProtocolError(""), requests.exceptions.MissingSchema(),
    RuntimeError("x"), Hostile(), SystemExit(1), ExceptionGroup("tasks", [KeyError(), ValueError()]),
    *(of(status) for of in (refused_with, answered, asked_by_requests, of_aiohttp, of_urllib) for status in (400, 404)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind"),
    [*((e, "outside: ") for e in OUTSIDE), *((e, "raised ") for e in OF_CODE)],
    ids=repr,
)
def test_faults_of_services_and_machines_are_told_from_those_of_code(error, kind):
    assert failure_kind(error) == f"{kind}{type(error).__name__}"
    below = RuntimeError("search failed")
    below.__cause__ = error
    assert failure_kind(below) == f"{kind}RuntimeError"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [2, 3, 9]),
        ({"min_completion_tokens": 3}, [3, 9]),
        ({"drop_truncated": True}, [2, 3]),
        ({"min_completion_tokens": 3, "drop_truncated": True}, [3]),
    ],
)
def test_short_and_truncated_completions_are_left_out(settings, kept):
    some = [generation(2), generation(3), replace(generation(9), finish_reason="length")]
    judge = make_judge([0.0, 0.5, 1.0], group_size=1, **settings)
    assert [len(rollout.token_ids) for rollout in judged(judge, some)] == kept
