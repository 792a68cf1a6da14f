# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The shares of time in which servers and the producer wait."""

import asyncio

from producer_world import World

from torchtitan.grpo.types import GenerateRequest, Generation


def test_time_without_a_ready_server_is_idle_also_while_requests_wait_for_one(run_world):
    async def body(world: World) -> None:
        (server,) = world.servers
        world.push(server, 0)
        held = asyncio.Event()
        generate = server.generate

        async def wait_first(request: GenerateRequest) -> Generation:
            await held.wait()
            return await generate(request)

        server.generate = wait_first  # pyright: ignore[reportAttributeAccessIssue]
        waiting = asyncio.create_task(world.producer.batch(0))
        while not world.dispatcher.in_flight:
            await asyncio.sleep(0.01)
        world.dispatcher.set_lost(server.url, "it was killed")
        await asyncio.sleep(0.5)
        held.set()
        world.push(server, 0)
        batch = await asyncio.wait_for(waiting, 60)
        assert batch.metrics["rollout/idle_fraction"] > 0.3

    run_world(body, prompts=list("123"), max_staleness=0)


def test_time_without_prompts_counts_as_waiting_for_the_trainer_only_while_it_is_busy(run_world):
    """With a bound of 0, no group may start between two batches before the next weights come."""

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
