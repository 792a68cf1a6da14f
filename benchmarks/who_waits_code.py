# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The user's code in the runs of `who_waits.py`: a reward, an environment, and an agent."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from torchtitan.grpo.rollout.environments import Environment, Observation

REWARD_SECONDS = 0.6
"""The rewards of a step's eight groups take longer than its training, also on a busy machine."""


def slow_reward(completions: Sequence[str], **_: Any) -> list[float]:
    time.sleep(REWARD_SECONDS)
    return [float(len(completion)) for completion in completions]


class Digits(Environment):
    """Answers the first turn with a digit, and ends with the second one.

    Each step takes ``seconds``, in which no other episode of the worker makes a step.
    """

    _step = threading.Lock()

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._num_turns = seconds, 0

    async def reset(self, prompt: Any) -> None:
        self._num_turns = 0

    async def step(self, text: str, token_ids: Sequence[int]) -> Observation:
        with self._step:
            time.sleep(self._seconds)
        self._num_turns += 1
        if self._num_turns == 1:
            return Observation(text="1")
        return Observation(is_done=True, reward=float(len(text)))

    async def cut_off(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass


async def agent(client: Any, row: dict[str, Any]) -> float:
    text = row["prompt"]
    for _ in range(2):
        answer = await client.completions.create(model="policy", prompt=text)
        text += answer.choices[0].text
    return float(len(text))
