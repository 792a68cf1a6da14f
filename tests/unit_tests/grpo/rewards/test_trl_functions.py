# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A file of reward functions for TRL, in each of the forms that its documentation shows, runs as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_pools import reward_pool

from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.reward_loading import short_names
from torchtitan.grpo.types import Prompt

# The signatures are those of https://huggingface.co/docs/trl/grpo_trainer and of trl.rewards.
FUNCTIONS = r"""
from __future__ import annotations

import asyncio, re
from typing import Callable

def token_count(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def num_unique_letters(completions, **kwargs):
    return [float(len({*completion.lower()})) for completion in completions]

def matches_truth(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [float(f is not None and f[1] == truth) for f, truth in zip(found, ground_truth)]

def format_reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"<think>.*?</think>", text) else 0.0 for text in texts]

def math_reward(prompts, completions, task, **kwargs):
    return [float("=" in p) if t == "math" else None for p, t in zip(prompts, task)]

def code_reward(prompts, completions, task, **kwargs):
    return [1.0 if t == "code" else None for t in task]

async def from_service(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if completion else 0.0 for completion in completions]

def shown(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", 0.25)
    return [0.0] * len(completions)

def curriculum(completions, trainer_state, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    return [share] * len(completions)

def with_types(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    return [float(s in c[0]["content"]) if s else None for c, s in zip(completions, solution)]

class Overlong:
    __name__ = "overlong_reward"

    def __init__(self, longest):
        self.longest = longest

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        return [0.0 if len(ids) <= self.longest else -1.0 for ids in completion_ids]

def get_overlong(longest):
    return Overlong(longest)

overlong = get_overlong(longest=1)
"""
COLUMNS = {"ground_truth": "4", "task": "math", "solution": "four"}
TEXTS = [r"\boxed{4}", "<think>2</think>four"]
# Values for a prompt that is a string, and for one that is a list of messages; "" is not asked for.
EXPECTED: dict[str, tuple[Any, Any]] = {
    "token_count": ([1.0, 2.0], [1.0, 2.0]),
    "num_unique_letters": ([9.0, 13.0], ""),
    "matches_truth": ([1.0, 0.0], ""),
    "format_reward": ("", [0.0, 1.0]),
    "math_reward": ([1.0, 1.0], ""),
    "code_reward": ([None, None], [None, None]),
    "from_service": ([1.0, 1.0], [1.0, 1.0]),
    "shown": ([0.0, 0.0], [0.0, 0.0]),
    "curriculum": ([0.75, 0.75], [0.75, 0.75]),
    "with_types": ("", [0.0, 1.0]),
    "overlong": ([0.0, -1.0], [0.0, -1.0]),
}


@pytest.mark.parametrize("concurrency", [0, 2])
async def test_a_file_for_trl_runs_unchanged(concurrency: int, tmp_path: Path):
    (file := tmp_path / "trl_rewards.py").write_text(FUNCTIONS)
    names = [f"{file}:{name}" for name in EXPECTED]
    assert short_names(names) == list(EXPECTED)
    texts = ["2+2=", [{"role": "user", "content": "2+2="}]]
    async with reward_pool(names, Reward(concurrency=concurrency), max_steps=4) as pool:
        pool.next_step = lambda: 3
        for text, column in zip(texts, zip(*EXPECTED.values(), strict=True), strict=True):
            prompt = Prompt(0, text, np.array([1], np.int32), COLUMNS)
            which = [i for i, values in enumerate(column) if values != ""]
            await pool.check(prompt, which)
            scored = await pool.score(prompt, TEXTS, [[1], [2, 3]], which)
            assert scored.values == [column[i] for i in which]
            assert scored.extra == {"golden_answer": ["4", "4"]}
            assert scored.metrics == {"accuracy": 0.25}
