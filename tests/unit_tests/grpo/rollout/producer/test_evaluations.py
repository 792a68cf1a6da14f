# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluations beside a producer at work, and the shares of time in which servers are idle."""

import asyncio
from pathlib import Path

from producer_world import REWARD, World

from torchtitan.grpo.types import GenerateRequest, Generation


def test_evaluation_waits_for_the_version_and_scores_every_prompt(run_world):
    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        evaluation = asyncio.create_task(world.evaluator.evaluate(2))
        await asyncio.wait_for(world.producer.batch(0), 60)
        assert not evaluation.done()
        world.push(world.servers[0], 2)
        result = await asyncio.wait_for(evaluation, 60)
        assert (result.num_prompts, result.version) == (3, 2)
        assert [sample.prompt for sample in result.sets[0].samples] == ["12", "21", "33"]
        assert result.score == 0.0

    run_world(body, prompts=["12", "21", "33"], max_staleness=0)


def test_evaluation_is_greedy_whatever_the_rollouts_are_sampled_with(run_world):
    async def body(world: World) -> None:
        (server,) = world.servers
        settings, write = [], server.generate

        async def note(request: GenerateRequest) -> Generation:
            settings.append((request.temperature, request.top_p, request.top_k))
            return await write(request)

        server.generate = note  # pyright: ignore[reportAttributeAccessIssue]
        world.push(server, 0)
        await asyncio.wait_for(world.evaluator.evaluate(0), 60)
        greedy = (0.0, 1.0, -1)
        assert settings.count(greedy) == 3, "one request for each held-out prompt"
        assert set(settings) <= {greedy, (1.0, 1.0, -1)}

    run_world(body, prompts=["12", "21", "33"], max_staleness=0)


def test_a_held_out_prompt_without_a_score_does_not_count(run_world, tmp_path: Path):
    (tmp_path / "mine.py").write_text(REWARD)

    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        result = await asyncio.wait_for(world.evaluator.evaluate(0), 60)
        # The function gives no value for "11", and fails for "00".
        assert [sample.prompt for sample in result.sets[0].samples] == ["22"]
        assert (result.num_prompts, result.score) == (1, 1.0)

    reward = f"{tmp_path / 'mine.py'}:by_prompt"
    prompts = ["00", "11", "22"]
    run_world(body, prompts=prompts, max_staleness=0, reward=reward, evaluation_function=0)


def test_time_without_prompts_counts_as_waiting_for_the_trainer_only_while_it_is_busy(run_world):
    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        await world.producer.batch(0)
        await asyncio.sleep(0.4)  # the trainer trains
        world.push(world.servers[0], 1)
        second = await world.producer.batch(1)
        held_back = second.metrics["rollout/wait_trainer_fraction"]
        assert 0.3 < held_back <= 1
        assert second.metrics["rollout/idle_fraction"] >= held_back - 0.1
        waiting = asyncio.create_task(world.producer.batch(2))
        await asyncio.sleep(0.6)  # the trainer waits for the batch, and the push takes its time
        world.push(world.servers[0], 2)
        third = await waiting
        assert third.metrics["rollout/wait_trainer_fraction"] < 0.3
        assert third.metrics["rollout/idle_fraction"] > 0.3

    run_world(body, prompts=list("123456789"), max_staleness=0)
