# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real worker processes, and real functions that hang, crash, print and lie."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
from processes import descendants
from stub_clients import in_loop

from torchtitan.grpo.rewards.scoring_pool import RewardError, RewardPool, ScoringFailed
from torchtitan.grpo.types import Prompt

FUNCTIONS = """
import os, subprocess, sys, time

def length(completions, **kw):
    return [float(len(c)) for c in completions]

def by_completion(completions, **kw):
    c = completions[0]
    if c == "hang":
        subprocess.Popen(["sleep", "98765.4321"])
        while True:
            time.sleep(1)
    if c == "nan":
        return [float("nan")] * len(completions)
    if c == "count":
        return [1.0]
    if c == "huge":
        return [1e300] * len(completions)
    if c == "channel":
        for file in range(3, 32):
            try:
                os.write(file, b"\\x03\\x00\\x00\\x00\\xff\\xff\\xff")
            except OSError:
                pass
    if c == "none":
        return [None] * len(completions)
    if c == "type":
        return ["good"] * len(completions)
    if c == "scalar":
        return 1.0
    if c == "raise":
        raise KeyError("no such thing")
    if c == "exit":
        os._exit(3)
    if c == "print":
        print("hello from a reward function", flush=True)
        os.write(1, b"raw bytes on stdout")
        return [float(len(sys.stdin.read()))] * len(completions)
    return [1.0] * len(completions)

def nan_at_once(completions, **kw):
    return [float("nan")] * len(completions)

def columns(prompts, completions, answer, completion_ids):
    assert prompts == ["2+2="] * 2 and completion_ids == [[1], [2, 3]], (prompts, completion_ids)
    return [float(a == c) for a, c in zip(answer, completions)]

def roles(prompts, completions, **kw):
    return [float(c[0]["role"] == "assistant" and p[0]["role"] == "user")
            for p, c in zip(prompts, completions)]
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
    names: list[str], timeout_seconds: float = 20.0, max_consecutive_failures: int = 8
) -> AsyncIterator[RewardPool]:
    pool = RewardPool(
        names,
        num_workers=1,
        timeout_seconds=timeout_seconds,
        max_consecutive_failures=max_consecutive_failures,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
    assert not _scoring_workers(), "a worker outlived its pool"


@in_loop
async def test_functions_get_lists_of_columns_and_ids(functions: str):
    async with started_pool([f"{functions}:columns", f"{functions}:length"]) as pool:
        assert await pool.score(PROMPT, ["4", "5"], IDS) == [[1.0, 0.0], [1.0, 1.0]]


@in_loop
async def test_conversational_prompts_give_conversational_completions(functions: str):
    async with started_pool([f"{functions}:roles"]) as pool:
        chat = Prompt(0, [{"role": "user", "content": "2+2="}], PROMPT.token_ids, {})
        assert await pool.score(chat, ["4", "5"], IDS) == [[1.0, 1.0]]


@in_loop
async def test_printing_and_reading_stdin_do_not_disturb_the_channel(functions: str):
    async with started_pool([f"{functions}:by_completion"]) as pool:
        assert await pool.score(PROMPT, ["print", "b"], IDS) == [[0.0, 0.0]]
        assert await pool.score(PROMPT, ["a", "b"], IDS) == [[1.0, 1.0]]


@in_loop
async def test_none_means_not_applicable(functions: str):
    async with started_pool([f"{functions}:by_completion"]) as pool:
        assert await pool.score(PROMPT, ["none", "b"], IDS) == [[None, None]]


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("nan", "must return finite numbers, got nan"),
        ("huge", r"numbers between -1e\+12 and 1e\+12, got 1e\+300"),
        ("channel", "reply .* is not valid: .* reward function wrote to a file descriptor"),
        ("count", "one number for each of 2 completions, got 1"),
        ("type", "must return numbers .* got 'good' of type str"),
        ("scalar", "must return a list of 2 numbers, got a float"),
        ("raise", "raised KeyError: 'no such thing'"),
        ("exit", "ended with exit code 3"),
    ],
)
@in_loop
async def test_what_cannot_be_trained_on_is_a_failure_of_one_group(
    functions: str, completion: str, message: str
):
    async with started_pool([f"{functions}:by_completion"]) as pool:
        with pytest.raises(ScoringFailed, match=message):
            await pool.score(PROMPT, [completion, "b"], IDS)
        assert await pool.score(PROMPT, ["a", "b"], IDS) == [[1.0, 1.0]]
        assert sum(pool.failures.values()) == 1


@in_loop
async def test_hanging_function_is_killed_with_its_children_and_the_worker_replaced(functions: str):
    async with started_pool([f"{functions}:by_completion"], timeout_seconds=2) as pool:
        before = _scoring_workers()
        assert before
        with pytest.raises(ScoringFailed, match=r"reward.timeout_seconds = 2"):
            await pool.score(PROMPT, ["hang", "b"], IDS)
        # The kernel ends a killed process some time after the signal was sent.
        async with asyncio.timeout(60):
            while any(_alive(process) for process in before) or _sleepers():
                await asyncio.sleep(0.02)
        assert await pool.score(PROMPT, ["a", "b"], IDS) == [[1.0, 1.0]]


def _scoring_workers() -> list[psutil.Process]:
    """The workers of this test; a process of the suite may have other children."""
    return descendants("torchtitan.grpo.rewards.scoring_worker")


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _sleepers() -> list[psutil.Process]:
    """The living processes that the hanging reward function started."""
    command = ["sleep", "98765.4321"]
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if p.info["cmdline"] == command and _alive(p)]


@in_loop
async def test_failures_in_a_row_end_the_run_with_the_last_reason(functions: str):
    async with started_pool([f"{functions}:by_completion"], max_consecutive_failures=3) as pool:
        for _ in range(2):
            with pytest.raises(ScoringFailed):
                await pool.score(PROMPT, ["nan", "b"], IDS)
        await pool.score(PROMPT, ["a", "b"], IDS)
        for _ in range(2):
            with pytest.raises(ScoringFailed):
                await pool.score(PROMPT, ["nan", "b"], IDS)
        with pytest.raises(RewardError, match=r"3 groups in a row .*raised KeyError"):
            await pool.score(PROMPT, ["raise", "b"], IDS)


UNPLAIN = {
    "image": object(),
    "pixels": np.zeros((2, 2)),
    "score": np.float32(1.0),
    "ratio": Fraction(1, 2),
    "nested": {"deep": [1 + 2j]},
    "large": 2**70,
    "half": "\ud83d",
}


@in_loop
async def test_column_that_is_no_plain_data_is_a_failure_of_one_group(functions: str):
    async with started_pool([f"{functions}:length"]) as pool:
        for name, value in UNPLAIN.items():
            odd = Prompt(7, "2+2=", PROMPT.token_ids, {"answer": "4", name: value})
            message = (
                rf"Prompt 7 \('2\+2='\) cannot be passed to the reward functions: column '{name}': "
            )
            with pytest.raises(ScoringFailed, match=message):
                await pool.score(odd, ["a", "b"], IDS)


@in_loop
async def test_functions_that_cannot_be_imported_in_time_are_refused_at_the_start(tmp_path: Path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    for name, seconds, message in (
        ("no_such_module:f", 20.0, "importing no_such_module failed"),
        (f"{file}:reward", 0.2, r"longer than 2 s, 10 times reward\.timeout_seconds"),
    ):
        with pytest.raises(RewardError, match=message):
            async with started_pool([name], timeout_seconds=seconds):
                pytest.fail("the pool must not start")


@in_loop
async def test_check_refuses_a_function_that_returns_nan(functions: str):
    async with started_pool([f"{functions}:nan_at_once"]) as pool:
        with pytest.raises(RewardError, match=r"finite numbers, got nan.*checked before training"):
            await pool.check(PROMPT)


@in_loop
async def test_functions_may_be_imported_for_longer_than_a_group_is_scored(tmp_path: Path):
    file = tmp_path / "slow_to_import.py"
    file.write_text(
        "import time\ntime.sleep(2.5)\ndef one(completions, **kw):\n    return [1.0] * len(completions)\n"
    )
    async with started_pool([f"{file}:one"], timeout_seconds=2.0) as pool:
        assert await pool.score(PROMPT, ["4", "5"], IDS) == [[1.0, 1.0]]


ODD_RESULTS = r"""
import numpy as np, torch, sys

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

async def coroutine(completions, **kw):
    return [1.0] * len(completions)

async def generator_async(completions, **kw):
    yield 1.0

class Callable:
    async def __call__(self, completions, **kw):
        return [1.0] * len(completions)

asynchronous_object = Callable()

def made(code):
    def reward(completions, **kw):
        n = len(completions)
        return eval(code)
    return reward

def raising(error):
    def reward(completions, **kw):
        print("half of a pair: \ud83d")
        raise error
    return reward

column = made("np.zeros((n, 1))")
row = made("torch.zeros(1, n)")
scalar = made("np.array(1.0)")
number = made("torch.tensor(1.0)")
lists = made("[[1.0]] * n")
tensors = made("[torch.zeros(1)] * n")
generator = made("(1.0 for _ in range(n))")
nothing = made("None")
a_set = made("{1.0, 2.0}")
a_dict = made("{0: 1.0, 1: 1.0}")
texts = made("['1.0'] * n")
text = made("'11'")
longer = made("[1.0] * (n + 1)")
scalars = made("[np.float32(0.5), None]")
booleans = made("[True, np.bool_(False)]")
vector = made("torch.tensor([0.5, 1.0])")
surrogate = raising(ValueError("\ud83d"))
silent = raising(Silent())
half = raising(OSError(5, "\udcff", "\udcfe.txt"))
huge = raising(ValueError("a" * 10_000_000))
tuple_error = raising(KeyError(("\ud83d", 1)))
"""
TOLD = {
    "coroutine": "got a coroutine. An async function is not awaited: define it with def",
    "generator_async": "got a async_generator. An async function is not awaited",
    "asynchronous_object": "got a coroutine. An async function is not awaited",
    "column": r"got a ndarray of shape \(2, 1\), not \(2,\). Return its .reshape\(-1\)",
    "row": r"got a Tensor of shape \(1, 2\), not \(2,\). Return its .reshape\(-1\)",
    "scalar": r"got a ndarray of shape \(\), not \(2,\)\.$",
    "number": r"got a Tensor of shape \(\), not \(2,\)\.$",
    "lists": r"got a list that holds \[1.0\], a list",
    "tensors": r"got a list that holds tensor\(\[0.\]\), a Tensor",
    "generator": "got a generator. Return a list",
    "nothing": "got None. Is a return statement missing",
    "a_set": "got a set. Return a list",
    "a_dict": "got a dict",
    "texts": "must return numbers .* got '1.0' of type str",
    "text": "got a str",
    "longer": "one number for each of 2 completions, got 3",
    "surrogate": r"raised ValueError: \\ud83d \(at ",
    "silent": r"raised Silent: \(its text cannot be read: RuntimeError\)",
    "half": r"raised OSError: .*\\udcff",
    "huge": r"raised ValueError: a{2000} \(at ",
    "tuple_error": "raised KeyError: ",
}
TAKEN = {"scalars": [0.5, None], "booleans": [1.0, 0.0], "vector": [0.5, 1.0]}


@in_loop
async def test_what_user_code_returns_and_raises_is_told_and_ends_no_worker(tmp_path: Path):
    file = tmp_path / "odd.py"
    file.write_text(ODD_RESULTS)
    names = [*TOLD, *TAKEN]
    async with started_pool(
        [f"{file}:{name}" for name in names], max_consecutive_failures=100
    ) as pool:
        (worker,) = _scoring_workers()
        for position, message in enumerate(TOLD.values()):
            with pytest.raises(ScoringFailed, match=message):
                await pool.score(PROMPT, ["a", "b"], IDS, [position])
        for name, values in TAKEN.items():
            assert await pool.score(PROMPT, ["a", "b"], IDS, [names.index(name)]) == [values]
        assert _scoring_workers() == [worker]


@in_loop
async def test_a_stopped_worker_makes_no_right_answer_wrong():
    """A pair takes a millisecond, so the stop falls within one of many."""
    half = Prompt(0, "1/2", PROMPT.token_ids, {"answer": "\\frac{1}{2}"})
    answers = [f"\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}" for n in range(2, 402)]
    async with started_pool(["boxed_math"], timeout_seconds=120) as pool:
        assert await pool.score(half, ["\\boxed{\\frac{4}{8}}"], [[]]) == [[1.0]]
        (worker,) = _scoring_workers()
        before = sum(worker.cpu_times()[:2])
        scoring = asyncio.create_task(pool.score(half, answers, [[]] * len(answers)))
        while sum(worker.cpu_times()[:2]) - before < 0.05:
            await asyncio.sleep(0.002)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(3.6)  # longer than a limit of wall-clock time would allow
        assert not scoring.done()
        os.kill(worker.pid, signal.SIGCONT)
        assert await scoring == [[1.0] * len(answers)]
