# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real worker processes, and real functions that hang, crash, print and lie."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import descendants
from reward_pools import WORKER, reward_pool

from torchtitan.grpo.config import Reward, Workers
from torchtitan.grpo.rewards.scoring_pool import RewardError, RewardPool, ScoringFailed
from torchtitan.grpo.types import Prompt

FUNCTIONS = """
import os, sys, time

def length(completions, **kw):
    return [float(len(c)) for c in completions]

def by_completion(completions, **kw):
    c = completions[0]
    if c == "hang":
        time.sleep(1000)
    if c == "nan":
        return [float("nan")] * len(completions)
    if c == "channel":
        for file in range(3, 32):
            try:
                os.write(file, b"\\x03\\x00\\x00\\x00\\xff\\xff\\xff")
            except OSError:
                pass
    if c == "exit":
        os._exit(3)
    if c == "print":
        print("hello from a reward function", flush=True)
        os.write(1, b"raw bytes on stdout")
        return [float(len(sys.stdin.read()))] * len(completions)
    return [1.0] * len(completions)

def columns(prompts, completions, answer, completion_ids):
    assert prompts == ["2+2="] * 2 and completion_ids == [[1], [2, 3]], (prompts, completion_ids)
    return [float(a == c) for a, c in zip(answer, completions)]

def roles(prompts, completions, **kw):
    return [float(c[0]["role"] == "assistant" and p[0]["role"] == "user")
            for p, c in zip(prompts, completions)]

def is_set(completions, **kw):
    return [float(name in os.environ) for name in completions]

def take(completions, **kw):
    return [float(len(bytearray(int(c)))) for c in completions]

"""

PROMPT = Prompt(0, "2+2=", np.array([1], np.int32), {"answer": "4"})
IDS = [[1], [2, 3]]


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


@contextlib.asynccontextmanager
async def started_pool(
    *names: str, seconds: float = 20.0, failures: int = 100, workers: Workers | None = None
) -> AsyncIterator[RewardPool]:
    limits = Reward(timeout_seconds=seconds, max_consecutive_failures=failures)
    async with reward_pool(names, limits, workers=workers) as pool:
        yield pool


async def values(pool: RewardPool, *arguments: Any) -> list[list[float | None]]:
    return (await pool.score(*arguments)).values


async def test_functions_get_lists_of_columns_and_ids_and_messages(functions: str):
    names = [f"{functions}:{name}" for name in ("columns", "length", "roles")]
    async with started_pool(*names) as pool:
        assert await values(pool, PROMPT, ["4", "5"], IDS, [0, 1]) == [[1.0, 0.0], [1.0, 1.0]]
        chat = Prompt(0, [{"role": "user", "content": "2+2="}], PROMPT.token_ids, {})
        assert await values(pool, chat, ["4", "5"], IDS, [2]) == [[1.0, 1.0]]


async def test_a_group_fails_alone_and_failures_in_a_row_end_the_run(functions: str):
    async with started_pool(f"{functions}:by_completion", failures=3) as pool:
        # Printing and reading disturb nothing.
        assert await values(pool, PROMPT, ["print", "b"], IDS) == [[0.0, 0.0]]
        for completion, message in (
            ("channel", "reply .* is not valid: .* reward function wrote to a file descriptor"),
            ("exit", "ended with exit code 3"),
        ):
            with pytest.raises(ScoringFailed, match=message):
                await pool.score(PROMPT, [completion, "b"], IDS)
        assert await values(pool, PROMPT, ["a", "b"], IDS) == [[1.0, 1.0]]
        assert sum(pool.failures.values()) == 2
        for _ in range(2):
            with pytest.raises(ScoringFailed, match="got nan"):
                await pool.score(PROMPT, ["nan", "b"], IDS)
        with pytest.raises(RewardError, match=r"3 groups in a row .*exit code 3"):
            await pool.score(PROMPT, ["exit", "b"], IDS)


async def test_the_success_of_one_function_does_not_hide_that_another_always_fails(functions: str):
    names = [f"{functions}:{name}" for name in ("by_completion", "length")]
    async with started_pool(*names, failures=2) as pool:
        for failed in (ScoringFailed, RewardError):
            assert await values(pool, PROMPT, ["a", "b"], IDS, [1]) == [[1.0, 1.0]]
            with pytest.raises(failed):
                await pool.score(PROMPT, ["nan", "b"], IDS, [0])


async def test_a_function_that_hangs_is_killed_and_the_worker_replaced(functions: str):
    async with started_pool(f"{functions}:by_completion") as pool:
        (before,) = descendants(WORKER)
        patience, pool.timeout_seconds = pool.timeout_seconds, 0.5
        with pytest.raises(ScoringFailed, match=r"reward.timeout_seconds = 0\.5"):
            await pool.score(PROMPT, ["hang", "b"], IDS)
        pool.timeout_seconds = patience
        assert await values(pool, PROMPT, ["a", "b"], IDS) == [[1.0, 1.0]]
        assert before not in descendants(WORKER)


UNPLAIN = {
    "image": object(), "pixels": np.zeros((2, 2)), "score": np.float32(1.0), "ratio": Fraction(1, 2),
    "nested": {"deep": [1 + 2j]}, "large": 2**70, "half": "\ud83d",
}  # fmt: skip


async def test_column_that_is_no_plain_data_is_a_failure_of_one_group(functions: str):
    async with started_pool(f"{functions}:length") as pool:
        for name, value in UNPLAIN.items():
            odd = Prompt(7, "2+2=", PROMPT.token_ids, {"answer": "4", name: value})
            message = rf"Prompt 7 \('2\+2='\) cannot be passed to the .*: column '{name}': "
            with pytest.raises(ScoringFailed, match=message):
                await pool.score(odd, ["a", "b"], IDS)


async def test_functions_that_cannot_be_imported_or_raise_at_once_are_refused(functions):
    with pytest.raises(RewardError, match="importing no_such_module failed"):
        async with started_pool("no_such_module:f"):
            pytest.fail("the pool must not start")
    async with started_pool(f"{functions}:take") as pool:
        with pytest.raises(RewardError, match="checked before training"):
            await pool.check(PROMPT)


async def test_workers_see_only_named_keys_and_have_a_limit_of_memory(functions, monkeypatch):
    names = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TORCHTITAN_GRPO_ADMIN_KEY"]
    for name in names:
        monkeypatch.setenv(name, "secret")
    given = Workers(["WANDB_API_KEY", "AWS_*"], max_memory_gib=4.0)
    async with started_pool(f"{functions}:is_set", f"{functions}:take", workers=given) as pool:
        scores = await values(pool, PROMPT, [*names, "PATH"], [[1]] * 5, [0])
        assert scores == [[1.0, 0.0, 1.0, 0.0, 1.0]]
        assert await values(pool, PROMPT, ["1000"], [[1]], [1]) == [[1000.0]]
        with pytest.raises(ScoringFailed, match="MemoryError"):
            await pool.score(PROMPT, [str(8 << 30)], [[1]], [1])


ODD_RESULTS = r"""
import asyncio, sys
import numpy as np, torch

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

async def awaited(completions):
    return [1.0] * len(completions)

def coroutine(completions):
    return awaited(completions)

async def generator_async(completions):
    yield 1.0

async def raising_async(completions):
    raise asyncio.CancelledError("by itself")

async def exiting_async(completions):
    sys.exit(3)

def result(code):
    return lambda completions: eval(code, globals(), {"n": len(completions)})

def raising(error):
    def reward(completions):
        print("half of a pair: \ud83d")
        raise error
    return reward
"""
# Each with the message or the scores that it comes to.
RETURNED = {
    "np.zeros((n, 1))": r"got a ndarray of shape \(2, 1\), not \(2,\). Return its .reshape\(-1\)",
    "torch.zeros(1, n)": r"got a Tensor of shape \(1, 2\), not \(2,\). Return its .reshape\(-1\)",
    "np.array(1.0)": r"got a ndarray of shape \(\), not \(2,\)\.$",
    "torch.tensor(1.0)": r"got a Tensor of shape \(\), not \(2,\)\.$",
    "[[1.0]] * n": r"got a list that holds \[1.0\], a list",
    "[torch.zeros(1)] * n": r"got a list that holds tensor\(\[0.\]\), a Tensor",
    "(1.0 for _ in range(2))": "got a generator. Return a list",
    "None": "got None. Is a return statement missing",
    "{1.0, 2.0}": "got a set. Return a list",
    "{0: 1.0, 1: 1.0}": "got a dict",
    "['1.0'] * n": "must return numbers .* got '1.0' of type str",
    "'11'": "got a str",
    "[1.0] * (n + 1)": "one number for each of 2 completions, got 3",
    "[1.0]": "one number for each of 2 completions, got 1",
    "1.0": "must return a list of 2 numbers, got a float",
    "[float('nan')] * n": "must return finite numbers, got nan",
    "[1e300] * n": r"numbers between -1e\+12 and 1e\+12, got 1e\+300",
    "[np.float32(0.5), None]": [0.5, None],
    "[True, np.bool_(False)]": [1.0, 0.0],
    "torch.tensor([0.5, 1.0])": [0.5, 1.0],
    "[None] * n": [None, None],
}
RAISED = {
    "KeyError('no such thing')": "raised KeyError: 'no such thing'",
    r"ValueError('\ud83d')": r"raised ValueError: \\ud83d \(at ",
    "Silent()": r"raised Silent: \(its text cannot be read: RuntimeError\)",
    r"OSError(5, '\udcff', '\udcfe.txt')": r"raised OSError: .*\\udcff",
    "ValueError('a' * 10_000_000)": r"raised ValueError: a{2000} \(at ",
    r"KeyError(('\ud83d', 1))": "raised KeyError: ",
}
ASYNC = {
    "awaited": [1.0, 1.0],
    "coroutine": "got a coroutine. Only a function that is defined with async def itself",
    "generator_async": "got a async_generator. Only a function that is defined with async def",
    "raising_async": r"raised CancelledError: by itself \(at ",
    "exiting_async": r"raised SystemExit: 3 \(at ",
}


async def test_what_user_code_returns_and_raises_is_told_and_ends_no_worker(tmp_path: Path):
    lines = [f"returned{i} = result({code!r})" for i, code in enumerate(RETURNED)]
    lines += [f"raised{i} = raising({code})" for i, code in enumerate(RAISED)]
    file = tmp_path / "odd.py"
    file.write_text("\n".join([ODD_RESULTS, *lines]))
    names = [*(line.split()[0] for line in lines), *ASYNC]
    async with started_pool(*(f"{file}:{name}" for name in names)) as pool:
        (worker,) = descendants(WORKER)
        for position, expected in enumerate((RETURNED | RAISED | ASYNC).values()):
            if isinstance(expected, list):
                assert await values(pool, PROMPT, ["a", "b"], IDS, [position]) == [expected]
                continue
            with pytest.raises(ScoringFailed, match=rf"^train\.jsonl:8: .*{expected}"):
                await pool.score(replace(PROMPT, row="train.jsonl:8"), ["a", "b"], IDS, [position])
        assert descendants(WORKER) == [worker]
