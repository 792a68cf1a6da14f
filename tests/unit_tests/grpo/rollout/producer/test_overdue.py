# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import re

import pytest
from rollouts import generation

from torchtitan.grpo.types import GenerateRequest, Generation


@pytest.mark.parametrize("overdue", ["drop", "wait"])
async def test_an_overdue_group_holds_up_its_batch_unless_it_is_to_be_dropped(world_of, overdue):
    let_go = asyncio.Event()

    async def hold_first_prompt(request: GenerateRequest) -> Generation:
        if request.prompt_ids == first_prompt:
            await let_go.wait()
        return await write(request)

    async with world_of(max_staleness=1, overdue=overdue) as world:
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()
        write = world.intercept(hold_first_prompt)
        world.push(0)
        await world.batch(0)
        world.push(1)
        second = asyncio.create_task(world.batch(1))
        if overdue == "drop":
            assert (await second).closed == {0: "overdue"}
            return
        lacks_one = re.compile(r"batch 1: [2-9] of 2 groups finished, .* 1 of them due now")
        while not lacks_one.match(world.producer.describe()):
            await asyncio.sleep(0.01)
        assert not second.done()
        let_go.set()
        batch = await second
        assert batch.closed == {} and batch.groups[0].group_id == 0


async def test_an_overdue_group_goes_on_under_newer_weights(world_of):
    """The first prompt's completions stop after their first segment until the batch is due."""
    let_go = asyncio.Event()

    async def whole_segments(request: GenerateRequest) -> Generation:
        if request.prompt_ids[: len(first_prompt)] != first_prompt:
            return await write(request)
        if len(request.prompt_ids) > len(first_prompt):
            await let_go.wait()
        version, length = world.servers[0].served, request.max_new_tokens
        return generation([5 + version] * length, version=version, finish_reason="length")

    async with world_of(max_staleness=1, overdue="resume", segment_tokens=2) as world:
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()
        write = world.intercept(whole_segments)
        world.push(0)
        first = await world.batch(0)
        assert 0 not in {group.group_id for group in first.groups}
        world.push(1)
        second = await world.batch(1)
        assert second.closed == {}
        assert second.metrics["rollout/resumed_groups"] == 1
        assert 0 not in {group.group_id for group in second.groups}
        assert 0 in second.progress.open
        let_go.set()
        version, group = 1, None
        while group is None:
            version += 1
            world.push(version)
            batch = await world.batch(version)
            group = next((g for g in batch.groups if g.group_id == 0), None)
        for rollout in group.rollouts:
            assert rollout.token_ids[:2].tolist() == [5, 5]
            assert rollout.sampled.tolist() == [False, False] + [True] * 4
            assert rollout.logprobs[:2].tolist() == [0, 0]
            # To a penalty of its length it is as long as what was written.
            assert (rollout.num_context, rollout.num_written) == (2, 6)
            assert rollout.segments[0].version == 0
            assert version - rollout.oldest_version <= 1


async def test_an_expired_group_is_closed_in_the_ledger_and_replaced(world_of):
    async with world_of(max_staleness=0) as world:
        (server,) = world.servers
        world.push(0)
        server.served = -1  # restarted, and nobody has noticed
        while world.dispatcher.servers[server.url].version is not None:
            await asyncio.sleep(0)
        world.push(0)
        batch = await world.batch(0)
        assert batch.closed and set(batch.closed.values()) == {"expired"}
        assert batch.metrics["rollout/expired_groups"] == len(batch.closed)
        trained = [group.group_id for group in batch.groups]
        known = sorted([*trained, *batch.closed, *batch.progress.open])
        assert known == list(range(batch.progress.position)), "each prompt has exactly one state"
