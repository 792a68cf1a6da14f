# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Batches of the producer: how old their samples are, in which order they come, and when."""

import asyncio
import random

import numpy as np
import pytest
from producer_world import GROUP_SIZE, GROUPS_PER_BATCH

from torchtitan.grpo.rollout.longest_first import LengthRanker
from torchtitan.grpo.rollout.trajectory import Trajectory
from torchtitan.grpo.rollout.waits import RolloutWaits
from torchtitan.grpo.types import BatchPart, GenerateRequest, Generation, Prompt


@pytest.mark.parametrize(("segment_tokens", "num_parts"), [(0, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_bound_holds_over_random_servers_deaths_and_restarts(
    world_of, max_staleness: int, segment_tokens: int, num_parts: int
):
    rng = random.Random(max_staleness)
    async with world_of(
        max_staleness=max_staleness, num_servers=3, failure_rate=0.02, seed=max_staleness,
        segment_tokens=segment_tokens, num_parts=num_parts,
    ) as world:  # fmt: skip
        for server in world.servers:
            world.push(0, server)
        seen: set[int] = set()
        for version in range(12):
            parts = []
            while not parts or not parts[-1].part.ends_batch:
                parts.append(await world.batch(version))
            groups = [group for part in parts for group in part.groups]
            assert (len(parts), len(groups)) == (num_parts, GROUPS_PER_BATCH)
            for group in groups:
                assert 2 <= len(group.rollouts) <= GROUP_SIZE
                assert group.group_id not in seen
                seen.add(group.group_id)
                ages = [version - rollout.oldest_version for rollout in group.rollouts]
                assert 0 <= min(ages) <= max(ages) <= max_staleness
            for server in world.servers[1:]:
                if rng.random() < 0.5:
                    world.push(version + 1, server)
                elif rng.random() < 0.5:
                    world.dispatcher.set_lost(server.url, "unlucky")
                elif rng.random() < 0.3:
                    server.served = -1  # restarted, and nobody has noticed
            world.push(version + 1)


class Later(LengthRanker):
    """Finds that answers get longer and longer."""

    def predict(self, prompt: Prompt) -> float:
        return float(prompt.group_id)


async def test_prompts_with_long_answers_are_started_first_among_those_of_a_batch(world_of):
    asked = []

    async def note(request: GenerateRequest) -> Generation:
        asked.append(int(request.request_id.split("-")[1]))
        return await write(request)

    async with world_of(max_staleness=0, ranker=Later(4.0)) as world:
        write = world.intercept(note)
        for version in range(3):
            world.push(version)
            # The set of prompts is that of the stream; their order is not.
            ids = [group.group_id for group in (await world.batch(version)).groups]
            assert ids == [2 * version, 2 * version + 1]
            assert list(dict.fromkeys(asked))[2 * version :][:2] == ids[::-1]


async def test_a_batch_comes_in_parts_before_its_last_group_is_there(world_of):
    go_on, prompts = asyncio.Event(), []

    async def hold_back(request: GenerateRequest) -> Generation:
        prompts.append(list(request.prompt_ids))
        if prompts[-1] != prompts[0]:
            await go_on.wait()
        return await write(request)

    async with world_of("12", max_staleness=0, num_parts=2) as world:
        write = world.intercept(hold_back)
        world.push(0)
        first = await world.batch(0)
        assert [group.prompt_text for group in first.groups] == ["1"]
        assert first.part is BatchPart.FIRST
        assert {0, 1} <= set(first.progress.open), "not trained before the batch is whole"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.producer.batch(0), 0.2)
        go_on.set()
        last = await world.batch(0)
        assert [group.prompt_text for group in last.groups] == ["2"]
        assert last.part is BatchPart.LAST
        assert not {0, 1} & set(last.progress.open)
        assert first.metrics == {}
        rewards = [r.reward for part in (first, last) for g in part.groups for r in g.rollouts]
        assert last.metrics["reward/mean"] == np.mean(rewards)


async def test_an_evaluation_beside_it_waits_for_the_version_and_scores_every_prompt(world_of):
    async with world_of(["12", "21", "33"], max_staleness=0) as world:
        world.push(0)
        evaluation = asyncio.create_task(world.evaluator.evaluate(2))
        await world.batch(0)
        assert not evaluation.done()
        world.push(2)
        result = await evaluation
        assert (result.num_prompts, result.version, result.score) == (3, 2, 0.0)
        assert [sample.prompt for sample in result.sets[0].samples] == ["12", "21", "33"]


def with_clock(world) -> list[float]:
    """Returns the time, in one element, by which the producer measures its shares."""
    now = [0.0]
    producer = world.producer
    producer.waits = RolloutWaits(
        producer._admission, producer._dispatcher, producer._judge, lambda: now[0]
    )
    return now


async def test_time_without_prompts_counts_as_waiting_for_the_trainer_only_while_it_is_busy(
    world_of,
):
    async with world_of(max_staleness=0) as world:
        now = with_clock(world)
        world.push(0)
        await world.batch(0)
        now[0] += 4.0  # the trainer trains
        world.push(1)
        second = await world.batch(1)
        assert second.metrics["rollout/wait_trainer_fraction"] == 1
        assert second.metrics["rollout/idle_fraction"] == 1
        waiting = asyncio.create_task(world.batch(2))
        while not world.producer.is_asked:
            await asyncio.sleep(0)
        now[0] += 6.0  # the trainer waits for the batch, and the push takes its time
        world.push(2)
        third = await waiting
        assert third.metrics["rollout/wait_trainer_fraction"] == 0
        assert third.metrics["rollout/idle_fraction"] == 1


async def test_time_without_a_ready_server_is_idle_also_while_requests_wait_for_one(world_of):
    held = asyncio.Event()

    async def wait_first(request: GenerateRequest) -> Generation:
        await held.wait()
        return await write(request)

    async with world_of("123", max_staleness=0) as world:
        write, now = world.intercept(wait_first), with_clock(world)
        world.push(0)
        waiting = asyncio.create_task(world.batch(0))
        while not world.dispatcher.in_flight:
            await asyncio.sleep(0.01)
        world.dispatcher.set_lost(world.servers[0].url, "it was killed")
        idle = world.producer.waits._idle
        while idle.cause != "idle":
            await asyncio.sleep(0.01)
        now[0] += 1.0
        held.set()
        world.push(0)
        assert (await waiting).metrics["rollout/idle_fraction"] == 1


async def test_a_trainer_that_waits_for_a_prompt_does_not_wait_for_rewards(world_of):
    written, gate, is_told = asyncio.Event(), asyncio.Event(), []
    async with world_of("123", max_staleness=0) as world:
        producer = world.producer
        judge, next_prompt = producer._judge.judge, producer._next_prompt

        async def judge_late(*arguments):
            written.set()
            await gate.wait()
            return await judge(*arguments)

        async def late_prompt():
            if len(producer._running) == 1:
                await written.wait()
                is_told.append(producer.waits._wait.cause == "rewards")
            return await next_prompt()

        producer._judge.judge, producer._next_prompt = judge_late, late_prompt
        world.push(0)
        waiting = asyncio.create_task(world.batch(0))
        while producer.waits._wait.cause != "rewards":
            await asyncio.sleep(0.01)
        assert len(producer._running) == 2
        assert is_told == [False]
        gate.set()
        await waiting


@pytest.mark.parametrize("cause", ["rewards", "episodes"])
async def test_what_the_trainer_waits_for_is_told(world_of, cause: str):
    gate = asyncio.Event()
    async with world_of("123", max_staleness=0) as world:
        now, producer = with_clock(world), world.producer
        judge, writer = producer._judge.judge, producer._writers[""]

        async def judge_late(*arguments):
            await gate.wait()
            return await judge(*arguments)

        class Programs:
            """Each completion is held by its program before its model writes."""

            def start(self, prompt, server, **settings):
                trajectory = Trajectory(prompt, None, settings["sample"])
                trajectory.task = asyncio.create_task(self.held(prompt, server, settings))
                return trajectory

            async def held(self, prompt, server, settings):
                with world.dispatcher.hold():
                    await gate.wait()
                return await writer.start(prompt, server, **settings).task

            def metrics(self):
                return {}

        if cause == "rewards":
            producer._judge.judge = judge_late
        else:
            producer._writers[""] = Programs()
        world.push(0)
        waiting = asyncio.create_task(world.batch(0))
        while producer.waits._wait.cause != cause:
            await asyncio.sleep(0.01)
        now[0] += 3.0
        done, wanted, num_tokens = producer.progress()
        assert (done, wanted) == (6 if cause == "rewards" else 0, 6)
        assert (num_tokens > 0) == (cause == "rewards")
        gate.set()
        metrics = (await waiting).metrics
        shares = [metrics[f"rollout/wait_{name}_fraction"] for name in ("rewards", "episodes")]
        assert shares == ([1, 0] if cause == "rewards" else [0, 1])
        assert metrics["rollout/scoring_seconds"] > 0
        # While it trains, nobody waits for either.
        now[0] += 1.0
        world.push(1)
        metrics = (await world.batch(1)).metrics
        assert (
            metrics["rollout/wait_rewards_fraction"]
            == metrics["rollout/wait_episodes_fraction"]
            == 0
        )
