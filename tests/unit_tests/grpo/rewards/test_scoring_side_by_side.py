# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups that one worker process scores at a time: real processes, and functions that need each other."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from processes import descendants
from reward_pools import WORKER, reward_pool

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards import scoring_pool
from torchtitan.grpo.rewards.reward_loading import NAMES
from torchtitan.grpo.rewards.scoring_pool import RewardError, RewardPool, ScoringFailed
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers import pool as workers_pool
from torchtitan.grpo.workers.owner import CallFailed

FUNCTIONS = """
import asyncio, functools, os, sys, threading, time
from pathlib import Path
from torchtitan.grpo.rewards import ScoreLater

# Nobody passes a barrier before as many groups, or functions of one group, have reached it.
three_groups, two_threads = asyncio.Barrier(3), threading.Barrier(2)
two_functions = sys.modules.setdefault("of all functions", asyncio.Barrier(2))

async def together(completions, **kw):
    if completions != [""]:
        await three_groups.wait()
    return [float(os.getpid())] * len(completions)

async def scaled(scale, completions, **kw):
    await two_functions.wait()
    return [scale] * len(completions)

class Object:
    async def __call__(self, completions, **kw):
        await two_functions.wait()
        return [2.0] * len(completions)

partial, instance = functools.partial(scaled, 3.0), Object()

def in_threads(completions, **kw):
    two_threads.wait()
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)

def alone(completions, **kw):
    asyncio.run(asyncio.sleep(0))
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)

cancelled = asyncio.Event()

async def waiting(completions, folder, **kw):
    what, folder = completions[0], Path(folder[0])
    (folder / what).touch()
    if what == "hang":
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()
    while what == "ignore":
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
    if what == "until cancelled":
        await cancelled.wait()
    if what == "block":
        time.sleep(1000)
    if what == "crash":
        os._exit(3)
    if what.startswith("first time") and not (folder / f"{what} again").exists():
        (folder / f"{what} again").touch()
        await asyncio.sleep(1000)
    if what == "raise" and completions != [""]:
        await three_groups.wait()
        raise KeyError(what)
    return [float(os.getpid())] * len(completions)

async def soon(completions, folder, **kw):
    tries = Path(folder[0]) / "tries"
    tries.touch()
    tries.open("a").write("x")
    if len(tries.read_text()) < int(completions[0] or 2):
        raise ScoreLater("the judge is out of reach")
    return [1.0] * len(completions)

async def later(completions, folder, **kw):
    tries, folder = 1, Path(folder[0])
    while completions == ["later"] and (folder / f"try {tries}").exists():
        tries += 1
    if completions == ["later"]:
        (folder / f"try {tries}").touch()
        while not (folder / f"told {tries}").exists():
            await asyncio.sleep(0.01)
        raise ScoreLater("it does not answer")
    return [1.0] * len(completions)

def in_thread(completions, folder, **kw):
    what, folder = completions[0], Path(folder[0])
    (folder / what).touch()
    while what == "hang" or (what == "until told" and not (folder / "told").exists()):
        time.sleep(0.01)
    return [float(os.getpid())] * len(completions)
"""


@contextlib.asynccontextmanager
async def started_pool(
    folder: Path,
    *names: str,
    concurrency: int = 0,
    failures: int = 8,
    on_failure: Callable[[CallFailed], object] = lambda failure: None,
) -> AsyncIterator[RewardPool]:
    file = folder / "functions.py"
    file.write_text(FUNCTIONS)
    settings = Reward(concurrency=concurrency, max_consecutive_failures=failures)
    functions = [name if name in NAMES else f"{file}:{name}" for name in names]
    async with reward_pool(functions, settings, on_failure=on_failure) as pool:
        yield pool


async def score(pool: RewardPool, what: str, folder: Path) -> float | None:
    prompt = Prompt(0, "1+1=", np.array([1], np.int32), {"folder": str(folder)})
    return (await pool.score(prompt, [what], [[1]])).values[0][0]


async def begin(pool: RewardPool, what: str, folder: Path) -> asyncio.Task[float | None]:
    """Returns once a worker has begun to score."""
    task = asyncio.create_task(score(pool, what, folder))
    while not (folder / what).exists():
        await asyncio.sleep(0.01)
    return task


async def test_async_functions_of_several_groups_wait_together_in_one_worker(tmp_path: Path):
    async with started_pool(tmp_path, "together") as pool:
        pids = await pool.check(Prompt(0, "", np.array([1], np.int32), {}))
        assert await asyncio.gather(*(score(pool, "a", tmp_path) for _ in range(3))) == pids * 3


async def test_async_functions_of_one_group_wait_together_in_each_of_their_forms(tmp_path: Path):
    async with started_pool(tmp_path, "partial", "instance", "alone", concurrency=1) as pool:
        prompt = Prompt(0, "", np.array([1], np.int32), {})
        scored = await pool.score(prompt, ["a"], [[1]], [2, 0, 1])
        assert scored.values == [[1.0], [3.0], [2.0]]
        assert not pool.warning
    async with started_pool(tmp_path, "partial", "alone") as pool:
        assert re.search(r"one group at a time, .* async def \(.*:alone\)", pool.warning)
    async with started_pool(tmp_path, "instance", "partial", "think_answer_tags") as pool:
        assert not pool.warning  # it takes no time


async def test_synchronous_functions_run_in_threads_if_the_user_says_so(tmp_path: Path):
    async with started_pool(tmp_path, "in_threads", concurrency=2) as pool:
        found = await asyncio.gather(*(score(pool, "a", tmp_path) for _ in range(2)))
        assert found == [0.0, 0.0]


async def test_an_async_function_that_hangs_is_cancelled_and_disturbs_no_other_group(
    tmp_path: Path,
):
    async with started_pool(tmp_path, "waiting") as pool:
        (worker,) = descendants(WORKER)
        patience, pool.timeout_seconds = pool.timeout_seconds, 0.5
        hanging = await begin(pool, "hang", tmp_path)
        pool.timeout_seconds = patience
        waiting = asyncio.create_task(score(pool, "until cancelled", tmp_path))
        with pytest.raises(ScoringFailed, match=r"longer than reward.timeout_seconds = ") as failed:
            await hanging
        assert failed.value.kind == "timeout"
        assert await waiting == worker.pid
        assert descendants(WORKER) == [worker]


async def test_a_group_that_nobody_waits_for_any_more_is_cancelled_alone(tmp_path: Path):
    async with started_pool(tmp_path, "waiting") as pool:
        (worker,) = descendants(WORKER)
        dropped = await begin(pool, "hang", tmp_path)
        waiting = await begin(pool, "until cancelled", tmp_path)
        dropped.cancel()
        assert await waiting == worker.pid
        assert descendants(WORKER) == [worker]
    async with started_pool(tmp_path, "in_thread") as pool:
        (worker,) = descendants(WORKER)
        (tmp_path / "hang").unlink()
        dropped = await begin(pool, "hang", tmp_path)
        dropped.cancel()
        assert await score(pool, "new", tmp_path) != worker.pid
        assert worker not in descendants(WORKER)


async def test_a_function_that_ignores_that_it_is_cancelled_costs_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torchtitan.grpo.workers.pool._CANCEL_SECONDS", 0.5)
    async with started_pool(tmp_path, "waiting") as pool:
        (worker,) = descendants(WORKER)
        dropped = await begin(pool, "ignore", tmp_path)
        dropped.cancel()
        await asyncio.wait({dropped})
        assert await score(pool, "new", tmp_path) != worker.pid


@pytest.mark.parametrize(("guilty", "kind"), [("block", "timeout"), ("crash", "crash")])
async def test_a_group_that_takes_its_worker_away_is_found_out_alone(
    guilty: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers_pool, "_CANCEL_SECONDS", 0.5)
    async with started_pool(tmp_path, "waiting", failures=2) as pool:
        (worker,) = descendants(WORKER)
        others = [await begin(pool, f"first time {i}", tmp_path) for i in range(3)]
        pool.timeout_seconds = 2.0
        with pytest.raises(ScoringFailed) as failed:
            await score(pool, guilty, tmp_path)
        assert failed.value.kind == kind
        assert worker.pid not in await asyncio.gather(*others)
        assert pool.failures == {kind: 1}


async def test_groups_beside_a_thread_that_hangs_end_before_their_worker_does(tmp_path: Path):
    async with started_pool(tmp_path, "in_thread", concurrency=2) as pool:
        (worker,) = descendants(WORKER)
        patience, pool.timeout_seconds = pool.timeout_seconds, 0.5
        hanging = await begin(pool, "hang", tmp_path)
        pool.timeout_seconds = patience
        other = await begin(pool, "until told", tmp_path)
        with pytest.raises(ScoringFailed, match=r"reward.timeout_seconds"):
            await hanging
        assert await score(pool, "new", tmp_path) != worker.pid  # it takes no new groups
        (tmp_path / "told").touch()
        assert await other == worker.pid
        assert worker not in descendants(WORKER)


async def test_groups_that_fail_at_the_same_time_count_as_one_of_a_row(tmp_path: Path):
    async with started_pool(tmp_path, "waiting", failures=2) as pool:
        for expected in (ScoringFailed, RewardError):
            found = await asyncio.gather(
                *(score(pool, "raise", tmp_path) for _ in range(3)), return_exceptions=True
            )
            assert {type(error) for error in found} == {ScoringFailed, expected}
        assert sum(pool.failures.values()) == 6


@pytest.mark.parametrize(("needed", "postponed"), [(3, 2), (100, 4)])
async def test_a_group_whose_judge_is_out_of_reach_is_scored_again_a_few_times(
    needed: int, postponed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring_pool, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    drops = DropLog(lambda text: None)
    async with started_pool(tmp_path, "soon", on_failure=drops.record_scoring) as pool:
        if needed == 3:
            assert await score(pool, "3", tmp_path) == 1.0
        else:
            with pytest.raises(
                ScoringFailed, match="soon' cannot be computed now: the judge is out of reach"
            ):
                await score(pool, "100", tmp_path)
        assert drops.counts == {"reward postponed": postponed}
        assert pool.describe() == ""
        monkeypatch.setattr(scoring_pool, "_PAUSES_SECONDS", (1000.0,))
        waiting = asyncio.create_task(score(pool, "1000", tmp_path))
        while not pool.describe():
            await asyncio.sleep(0.01)
        assert re.match("1 groups wait to be scored again: .* out of reach", pool.describe())
        waiting.cancel()
        (tmp_path / "tries").unlink()
        with pytest.raises(RewardError, match=r"out of reach \(checked before training"):
            prompt = Prompt(0, "", np.array([1], np.int32), {"folder": str(tmp_path)})
            await pool.check(prompt)


@pytest.mark.parametrize(("is_slow", "with_others", "tries"), [(1, 1, 2), (1, 0, 4), (0, 1, 4)])
async def test_a_group_for_which_a_judge_does_not_answer_in_time_is_given_up_if_it_answers_others(
    is_slow: bool, with_others: bool, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring_pool, "_PAUSES_SECONDS", (0.0,) * 3)
    monkeypatch.setattr(scoring_pool, "_SLOW_PART", 0.0 if is_slow else 1.0)
    drops = DropLog(lambda text: None)
    async with started_pool(tmp_path, "later", on_failure=drops.record_scoring) as pool:
        waiting = asyncio.create_task(score(pool, "later", tmp_path))
        for i in range(1, tries + 1):
            while not (tmp_path / f"try {i}").exists():
                await asyncio.sleep(0.01)
            if i == 1 and with_others:
                assert await score(pool, "a", tmp_path) == 1.0
            (tmp_path / f"told {i}").touch()
        with pytest.raises(ScoringFailed, match="it does not answer"):
            await waiting
        assert drops.counts == {"reward postponed": tries}
