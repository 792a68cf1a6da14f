# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What real reward workers see of the trainer's environment, and how much they may use."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.process import Surroundings

FUNCTIONS = """
import os

def is_set(completions, **kw):
    return [float(name in os.environ) for name in completions]

def take(completions, **kw):
    return [float(len(bytearray(int(c)))) for c in completions]

def compute(completions, **kw):
    while True:
        pass
"""
SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TORCHTITAN_GRPO_ADMIN_KEY"]
PROMPT = Prompt(0, "?", np.array([1], np.int32), {})


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def run_with_pool(
    function: str, surroundings: Surroundings, body: Callable[[RewardPool], Awaitable[None]]
) -> None:
    async def run() -> None:
        pool = RewardPool(
            [function], num_workers=1, timeout_seconds=60.0, max_consecutive_failures=8,
            surroundings=surroundings,
        )  # fmt: skip
        try:
            await pool.start()
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def test_workers_see_paths_and_no_keys_but_those_that_are_named(functions: str, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")

    async def body(pool: RewardPool) -> None:
        scores = await pool.score(PROMPT, [*SECRETS, "PATH"], [[1]] * 5)
        assert scores == [[1.0, 0.0, 1.0, 0.0, 1.0]]

    run_with_pool(f"{functions}:is_set", Surroundings(("WANDB_API_KEY", "AWS_*")), body)


def test_memory_beyond_the_limit_is_an_error_of_the_function(functions: str):
    async def body(pool: RewardPool) -> None:
        assert await pool.score(PROMPT, ["1000"], [[1]]) == [[1000.0]]
        with pytest.raises(ScoringFailed, match="MemoryError"):
            await pool.score(PROMPT, [str(8 << 30)], [[1]])

    run_with_pool(f"{functions}:take", Surroundings(max_memory_gib=4.0), body)


def test_a_worker_that_computes_beyond_the_limit_is_ended(functions: str):
    async def body(pool: RewardPool) -> None:
        with pytest.raises(ScoringFailed, match=r"ended with exit code -24"):  # SIGXCPU
            await pool.score(PROMPT, ["1"], [[1]])

    # The imports of a worker take processor time as well; the limit of a call is far above.
    run_with_pool(f"{functions}:compute", Surroundings(max_cpu_seconds=5), body)
