# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups that a batch would have to wait for, or that are too old for any batch."""

import asyncio
import re

import pytest
from producer_world import GROUP_SIZE, World
from rollouts import generation

from torchtitan.grpo.types import GenerateRequest, Generation


@pytest.mark.parametrize("overdue", ["drop", "wait"])
def test_an_overdue_group_holds_up_its_batch_unless_it_is_to_be_dropped(run_world, overdue):
    async def body(world: World) -> None:
        (server,) = world.servers
        let_go, write = asyncio.Event(), server.generate

        async def hold_first_prompt(request: GenerateRequest) -> Generation:
            if request.prompt_ids == first_prompt:
                await let_go.wait()
            return await write(request)

        server.generate = hold_first_prompt  # pyright: ignore[reportAttributeAccessIssue]
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()
        world.push(server, 0)
        await asyncio.wait_for(world.producer.batch(0), 60)
        world.push(server, 1)
        second = asyncio.create_task(world.producer.batch(1))
        if overdue == "drop":
            assert (await asyncio.wait_for(second, 60)).closed == {0: "overdue"}
        else:
            lacks_one = re.compile(r"batch 1: [2-9] of 2 groups finished, .* 1 of them due now")
            async with asyncio.timeout(60):
                while not lacks_one.match(world.producer.describe()):
                    await asyncio.sleep(0.01)
            assert not second.done()
            let_go.set()
            batch = await asyncio.wait_for(second, 60)
            assert batch.closed == {} and batch.groups[0].group_id == 0

    run_world(body, prompts=list("123456789"), max_staleness=1, overdue=overdue)


@pytest.mark.parametrize("overdue", ["cut", "resume"])
def test_an_overdue_group_is_cut_or_goes_on_under_newer_weights(run_world, overdue):
    """The first prompt's completions stop after their first segment until the batch is due."""

    async def body(world: World) -> None:
        (server,) = world.servers
        let_go, write = asyncio.Event(), server.generate

        async def whole_segments(request: GenerateRequest) -> Generation:
            prompt = request.prompt_ids[: len(first_prompt)]
            if prompt == first_prompt and len(request.prompt_ids) > len(first_prompt):
                await let_go.wait()
            length = request.max_new_tokens
            if prompt != first_prompt:
                return await write(request)
            version = server.served
            return generation([5 + version] * length, version=version, finish_reason="length")

        server.generate = whole_segments  # pyright: ignore[reportAttributeAccessIssue]
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()
        world.push(server, 0)
        first = await asyncio.wait_for(world.producer.batch(0), 60)
        assert 0 not in {group.group_id for group in first.groups}
        world.push(server, 1)
        second = await asyncio.wait_for(world.producer.batch(1), 60)
        assert second.closed == {}
        groups = {group.group_id: group for group in second.groups}
        if overdue == "cut":
            assert second.metrics["rollout/cut_rollouts"] == GROUP_SIZE
            assert [r.token_ids.tolist() for r in groups[0].rollouts] == [[5, 5]] * GROUP_SIZE
            assert {r.finish_reason for r in groups[0].rollouts} == {"length"}
            return
        assert second.metrics["rollout/resumed_groups"] == 1
        assert 0 not in groups
        assert 0 in second.progress.open
        let_go.set()
        version, group = 2, None
        while group is None:
            world.push(server, version)
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            group = next((g for g in batch.groups if g.group_id == 0), None)
            version += 1
        for rollout in group.rollouts:
            assert rollout.token_ids[:2].tolist() == [5, 5]
            assert rollout.sampled is not None
            assert rollout.sampled.tolist() == [False, False] + [True] * 4
            assert rollout.logprobs[:2].tolist() == [0, 0]
            # To a penalty of its length it is as long as what was written.
            assert (rollout.num_context, rollout.num_written) == (2, 6)
            assert rollout.segments[0].version == 0
            assert version - 1 - rollout.oldest_version <= 1

    run_world(body, prompts=list("123456789"), max_staleness=1, overdue=overdue, segment_tokens=2)


def test_an_expired_group_is_closed_in_the_ledger_and_replaced(run_world):
    async def body(world: World) -> None:
        (server,) = world.servers
        world.push(server, 0)
        server.served = -1  # restarted, and nobody has noticed
        async with asyncio.timeout(60):
            while world.dispatcher.servers[server.url].version is not None:
                await asyncio.sleep(0)
        world.push(server, 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        assert batch.closed and set(batch.closed.values()) == {"expired"}
        assert batch.metrics["rollout/expired_groups"] == len(batch.closed)
        trained = [group.group_id for group in batch.groups]
        known = sorted([*trained, *batch.closed, *batch.progress.open])
        assert known == list(range(batch.progress.position)), "each prompt has exactly one state"

    run_world(body, prompts=list("123456789"), max_staleness=0)
