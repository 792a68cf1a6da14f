# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures whether a policy learns to write what cannot be scored.

    python benchmarks/unscored_exit.py [--json] [--quick] [--seed 0]

A bandit stands for the policy: one prompt, and a softmax over a few actions, each of which is a text.
``boxed_math`` scores the texts in a worker process, and groups are judged and advantages computed as
in a run. One action is a number that no computer holds, so it has no score. It is chosen three
times in ten at first. An attempt succeeds

- ``often``: three times in ten, whatever the policy learns;
- ``rarely``: 2 times in 100 at first, and the policy can learn which action is right.

Both are learned without ``reward.unscorable_value`` and with 0. The table shows how often the
policy chooses what cannot be scored. The exit status is 1 unless, in both cases,

1. the value brings that share below 0.02, and
2. without it, the share is higher, and the guard ``unscored`` warns and names the policy as the cause.

It takes about a minute on two cores of a CPU. With ``--json`` the last line is a JSON object.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from figures import finish, make_parser

from torchtitan.grpo.config import GRPO, Reward, Rollout
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.judging import GroupJudge, Rules, Unusable
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.training.guards import Guards
from torchtitan.grpo.types import Generation, Prompt, VersionSegment
from torchtitan.grpo.types import Rollout as Scored

TEXTS = ["\\boxed{4}", "\\boxed{5}", "\\boxed{9^{9^{9^{9}}}}"]
RIGHT, WRONG, UNSCORABLE = range(3)
FUNCTION = "boxed_math"
PROMPT = Prompt(0, "2+2=", np.array([0], np.int32), {"answer": "4"})
NUM_STEPS, LEARNING_RATE = 400, 0.4
QUICK = 4  # times fewer and larger steps
LOW_SHARE = 0.02
NUM_GROUPS, GROUP_SIZE = 16, 8


@dataclass(frozen=True)
class Case:
    """For each action its share at first, and how often each of the texts is what comes of it."""

    shares: Sequence[float]
    texts: Sequence[Sequence[float]]


CASES = {
    "often": Case([0.7, 0.3], [[0.3, 0.7, 0.0], [0.0, 0.0, 1.0]]),
    "rarely": Case([0.02, 0.68, 0.3], np.eye(3).tolist()),
}


class Texts:
    """Decodes a token, the number of a text, in the place of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return TEXTS[token_ids[0]]


class Bandit:
    """A policy of one decision, whose groups take the way of a run."""

    def __init__(
        self, case: Case, pool: RewardPool, value: float | None, rate: float, seed: int
    ) -> None:
        self._case, self._rate, self._random = case, rate, np.random.default_rng(seed)
        self._logits = np.log(np.array(case.shares))
        self._config = GRPO(group_size=GROUP_SIZE, prompts_per_step=NUM_GROUPS)
        scorer = Scorer(pool, Texts(), [FUNCTION], [], unscorable_value=value)  # pyright: ignore[reportArgumentType]
        rules = {"": Rules(scorer, Rollout())}
        self._judge = GroupJudge(rules, Rollout(), self._config)
        self.warnings: list[str] = []
        self.unscorable: list[float] = []
        self._guards = Guards(JobConfig(), self.warnings.append)

    @property
    def shares(self) -> np.ndarray:
        weights = np.exp(self._logits - self._logits.max())
        return weights / weights.sum()

    async def step(self, step: int) -> None:
        shape = NUM_GROUPS, GROUP_SIZE
        actions = self._random.choice(len(self.shares), size=shape, p=self.shares)
        judged = await asyncio.gather(*(self._judged(group) for group in actions))
        kept = [(action, r, i) for i, group in enumerate(judged) for action, r in group]
        metrics = self._judge.take_metrics()
        self.unscorable.append(metrics["rollout/unscorable_fraction"])
        self._guards.judge_unscored(step, metrics)
        if kept:
            self._learn(*map(np.array, zip(*kept, strict=True)))

    async def _judged(self, actions: np.ndarray) -> list[tuple[int, float]]:
        """The actions of a group that are trained on, with their rewards."""
        # The place in the group is a second token, from which a rollout's action is found again.
        drawn = [self._random.choice(len(TEXTS), p=self._case.texts[action]) for action in actions]
        generations = [written([text, i]) for i, text in enumerate(drawn)]
        try:
            rollouts: list[Scored] = await self._judge.judge(PROMPT, generations)
        except Unusable:
            return []
        return [(int(actions[r.token_ids[1]]), r.reward or 0.0) for r in rollouts]

    def _learn(self, actions: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> None:
        config, shares = self._config, self.shares
        assert config.advantage != "gae"
        advantages = compute_advantages(rewards, groups, kind=config.advantage)
        gradient = advantages @ (np.eye(len(shares))[actions] - shares)
        self._logits = self._logits + self._rate * gradient / len(rewards)


def written(token_ids: list[int]) -> Generation:
    length = len(token_ids)
    segments = (VersionSegment(0, 0, length),)
    return Generation(np.array(token_ids, np.int32), np.zeros(length, np.float32), "stop", segments)


async def measure(faster: int, seed: int) -> tuple[dict[str, float], list[str]]:
    figures: dict[str, float] = {}
    broken: list[str] = []
    pool = RewardPool([FUNCTION], Reward())
    try:
        await pool.start()
        for name, case in CASES.items():
            shares: dict[float | None, float] = {}
            for value in (None, 0.0):
                bandit = Bandit(case, pool, value, faster * LEARNING_RATE, seed)
                for step in range(1, NUM_STEPS // faster + 1):
                    await bandit.step(step)
                way = f"{name}/{'left_out' if value is None else 'value_0'}"
                shares[value] = figures[f"{way}/share"] = float(bandit.shares[-1])
                figures[f"{way}/first_unscorable_fraction"] = bandit.unscorable[0]
                figures[f"{way}/highest_unscorable_fraction"] = max(bandit.unscorable)
                figures[f"{way}/warnings"] = float(len(bandit.warnings))
                if value is None and not any(
                    "by policy, 0 by service, 0 by function" in text for text in bandit.warnings
                ):
                    broken.append(f"{way}: the guard must name the policy, got {bandit.warnings}")
            if shares[0.0] >= LOW_SHARE or shares[0.0] >= shares[None]:
                broken.append(f"{name}: the value must bring the share below {LOW_SHARE}: {shares}")
    finally:
        await pool.close()
    return figures, broken


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and larger steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures, broken = asyncio.run(measure(QUICK if options.quick else 1, options.seed))
    for name, value in figures.items():
        print(f"{name:45} {value:.3f}")
    for problem in broken:
        print(f"FAIL {problem}")
    return finish(options, "unscored_exit", not broken, figures)


if __name__ == "__main__":
    sys.exit(main())
