# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The producer with real prompts, tokenizer, reward workers, and servers that misbehave."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rewards.pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.dispatch import Dispatcher
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream, first_prompts
from torchtitan.grpo.rollout.requests import Sampling
from torchtitan.grpo.rollout.rows import open_rows
from torchtitan.grpo.rollout.scoring import Scorer, weighted_sum
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import GenerateRequest, Generation, VersionSegment

GROUP_SIZE = 3
GROUPS_PER_BATCH = 2

REWARD = """
def by_prompt(prompts, completions, **kw):
    if "0" in prompts[0]:
        raise ValueError("no zeros")
    return [None if i == 0 and "1" in prompts[0] else 1.0 for i in range(len(completions))]
"""


class RandomServer(InferenceClient):
    """Writes after a random number of turns of the loop, under the version it is set to."""

    def __init__(self, url: str, rng: random.Random, failure_rate: float) -> None:
        self.url = url
        self.rng = rng
        self.failure_rate = failure_rate
        self.served = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        first = self.served
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
        if self.rng.random() < self.failure_rate:
            raise ServerError(f"{self.url}: unlucky")
        length = self.rng.randint(2, request.max_new_tokens)
        segments = (VersionSegment(first, 0, 1), VersionSegment(self.served, 1, length))
        return Generation(
            np.array(request.prompt_ids[:1] * length, np.int32),
            np.full(length, -0.5, np.float32),
            "stop",
            segments,
        )

    async def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this server only generates")

    abort = health = version = num_workers = pause = resume = _none
    join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = prompt_logprobs = close = _none


@dataclass
class World:
    """A producer and what is around it."""

    servers: list[RandomServer]
    dispatcher: Dispatcher
    producer: Producer
    evaluator: Evaluator

    def push(self, server: RandomServer, version: int) -> None:
        server.served = version
        self.dispatcher.set_version(server.url, version)


@pytest.fixture
def run_world(repository: Path, tmp_path: Path):
    """Runs a test's body while a producer of the given settings is at work."""

    def run(
        body: Callable[[World], Awaitable[None]],
        *,
        prompts: list[str],
        max_staleness: int,
        num_servers: int = 1,
        failure_rate: float = 0.0,
        reward: str = "exact_match",
        seed: int = 0,
    ) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "answer": "7"}) + "\n" for p in prompts))
        codec = TextCodec(str(repository / "assets/reverse_digits/model"), [1])
        table = Prompts(path=str(file), shuffle=False)
        rows = open_rows(table.path, "train", {}, "prompt", "prompts.path")
        prompt_set = PromptSet(rows, table, codec, PromptLimits(20, 128), "prompts.path")
        rng = random.Random(seed)

        async def main() -> None:
            pool = RewardPool(
                [reward, "exact_match"],
                num_workers=1,
                timeout_seconds=30,
                max_consecutive_failures=1000,
            )
            await pool.start()
            servers = [RandomServer(f"http://{i}", rng, failure_rate) for i in range(num_servers)]
            dispatcher = Dispatcher(
                servers, vocab_size=128, request_timeout_seconds=30, max_consecutive_failures=1000
            )
            admission = Admission(
                groups_per_batch=GROUPS_PER_BATCH,
                max_staleness=max_staleness,
                group_size=GROUP_SIZE,
                max_concurrent_rollouts=12,
            )
            sampling = Sampling(6, 26, 1.0, 1.0, -1, (1,))
            producer = Producer(
                PromptStream(prompt_set, seed=0, shuffle=False),
                admission,
                dispatcher,
                Scorer(pool, codec, [reward], [2.0]),
                sampling,
                group_size=GROUP_SIZE,
                prompt_position=0,
            )
            held_out, _ = first_prompts(prompt_set, 0)
            evaluator = Evaluator(held_out, dispatcher, pool, 1, codec, sampling, 12)
            work = asyncio.create_task(producer.run())
            try:
                await body(World(servers, dispatcher, producer, evaluator))
                assert not work.done()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await pool.close()

        asyncio.run(main())

    return run


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_bound_holds_over_random_servers_deaths_and_restarts(run_world, max_staleness: int):
    num_steps = 12

    async def body(world: World) -> None:
        rng = random.Random(max_staleness)
        for server in world.servers:
            world.push(server, 0)
        seen: set[int] = set()
        for version in range(num_steps):
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            assert len(batch.groups) == GROUPS_PER_BATCH
            for group in batch.groups:
                assert 2 <= len(group.rollouts) <= GROUP_SIZE
                assert group.group_id not in seen
                seen.add(group.group_id)
                ages = [version - rollout.oldest_version for rollout in group.rollouts]
                assert 0 <= min(ages) <= max(ages) <= max_staleness
            for server in world.servers[1:]:
                if rng.random() < 0.5:
                    world.push(server, version + 1)
                elif rng.random() < 0.5:
                    world.dispatcher.set_lost(server.url, "unlucky")
                elif rng.random() < 0.3:
                    server.served = -1  # restarted, and nobody has noticed
            world.push(world.servers[0], version + 1)

    run_world(
        body,
        prompts=list("123456789"),
        max_staleness=max_staleness,
        num_servers=3,
        failure_rate=0.02,
        seed=max_staleness,
    )


def test_unscored_groups_are_replaced_and_unscored_rollouts_left_out(run_world, tmp_path: Path):
    (tmp_path / "mine.py").write_text(REWARD)

    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [group.prompt_text for group in batch.groups] == ["11", "22"]
        assert [len(group.rollouts) for group in batch.groups] == [GROUP_SIZE - 1, GROUP_SIZE]
        assert {r.reward for group in batch.groups for r in group.rollouts} == {2.0}
        assert batch.metrics["rollout/unscored_groups"] == 1
        assert batch.metrics["reward/by_prompt"] == 1.0
        assert batch.metrics["reward/mean"] == 2.0
        assert batch.metrics["reward/std"] == 0.0
        assert batch.prompt_position == 3

    run_world(
        body,
        prompts=["00", "11", "22"],
        max_staleness=0,
        reward=f"{tmp_path / 'mine.py'}:by_prompt",
    )


def test_trainer_out_of_step_is_refused(run_world):
    async def body(world: World) -> None:
        with pytest.raises(RuntimeError, match=r"asked for the batch of version 3.* out of step"):
            await world.producer.batch(3)

    run_world(body, prompts=["1"], max_staleness=0)


def test_evaluation_waits_for_the_version_and_scores_every_prompt(run_world):
    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        evaluation = asyncio.create_task(world.evaluator.evaluate(2))
        await asyncio.wait_for(world.producer.batch(0), 60)
        assert not evaluation.done()
        world.push(world.servers[0], 2)
        result = await asyncio.wait_for(evaluation, 60)
        assert (result.num_prompts, result.version) == (3, 2)
        assert [sample.prompt for sample in result.samples] == ["12", "21", "33"]
        assert result.score == 0.0

    run_world(body, prompts=["12", "21", "33"], max_staleness=0)


def test_reward_is_the_weighted_sum_of_what_applies():
    assert weighted_sum([1.0, 0.5], [2.0, 4.0]) == 4.0
    assert weighted_sum([None, 0.5], [2.0, 4.0]) == 2.0
    assert weighted_sum([None, None], [2.0, 4.0]) is None
