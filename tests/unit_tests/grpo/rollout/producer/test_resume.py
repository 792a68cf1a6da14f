# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the producer keeps with a checkpoint, and how it goes on from there."""

import asyncio

import pytest
from producer_world import GROUPS_PER_BATCH, World
from rollouts import generation, rollout
from rollouts import group as group_of

from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup
from torchtitan.grpo.types import GenerateRequest, Generation, PromptProgress


def test_rollouts_kept_with_a_checkpoint_continue_and_none_is_lost_or_generated_twice(run_world):
    kept: list[SavedRollouts] = []
    trained: list[int] = []

    async def first(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        trained.extend(group.group_id for group in batch.groups)
        while not (saved := world.producer.save(1)).finished:
            await asyncio.sleep(0.01)
        kept.append(saved)

    run_world(first, prompts=list("123456789"), max_staleness=2)
    (saved,) = kept
    in_file = {group.group_id for group in saved.finished}
    assert in_file <= set(saved.progress.open)

    async def second(world: World) -> None:
        world.push(world.servers[0], 1)
        for version in (1, 2, 3):
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            trained.extend(group.group_id for group in batch.groups)
            for group in batch.groups:
                ages = [version - rollout.oldest_version for rollout in group.rollouts]
                assert 0 <= min(ages) <= max(ages) <= 2
            world.push(world.servers[0], version + 1)
        # What was finished before is in the first of these batches.
        assert in_file <= set(trained[2:])
        position, still_open = batch.progress.position, set(batch.progress.open)
        assert sorted([*trained, *still_open]) == list(range(position))

    run_world(second, prompts=list("123456789"), max_staleness=2, saved=saved)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_batch_that_was_delivered_but_not_trained_is_kept(run_world, num_parts):
    """A run is stopped while its trainer holds a batch, or a part of one."""
    kept: list[SavedRollouts] = []
    delivered: list[set[int]] = []

    async def first(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        saved = world.producer.save(0)
        delivered.append({group.group_id for group in batch.groups})
        assert saved.version == 0
        assert delivered[0] <= {group.group_id for group in saved.finished}
        assert delivered[0] <= set(saved.progress.open)
        assert not delivered[0] & saved.closed.keys()
        kept.append(saved)

    run_world(first, prompts=list("123456789"), max_staleness=2, num_parts=num_parts)

    async def second(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        # A group that was not finished before may come with them.
        assert delivered[0] <= {group.group_id for group in batch.groups}

    run_world(second, prompts=list("123456789"), max_staleness=2, saved=kept[0])


def test_a_full_buffer_of_saved_groups_does_not_hold_up_what_their_batch_waits_for(run_world):
    """Prompt 0 has nothing saved and may not start; the batch needs group 4, behind it."""
    saved = SavedRollouts(
        version=2,
        progress=PromptProgress(5, (0, 1, 2, 4)),
        finished=tuple(group_of(i, *[rollout(2, version=2)] * 2) for i in (1, 2)),
        unfinished=(UnfinishedGroup(4, 0, (), ()),),
    )

    async def body(world: World) -> None:
        world.push(world.servers[0], 2)
        batch = await asyncio.wait_for(world.producer.batch(2), 60)
        assert batch.closed == {}
        # Written under version 2 after all, it is due later than it was.
        assert {group.group_id for group in batch.groups} == {1, 2}
        following = await asyncio.wait_for(world.producer.batch(3), 60)
        assert 4 in {group.group_id for group in following.groups}

    run_world(
        body, prompts=list("123456789"), max_staleness=2, saved=saved, max_buffered=GROUPS_PER_BATCH
    )


def test_a_saved_group_goes_on_only_on_servers_that_are_as_new_as_its_first(run_world):
    saved = SavedRollouts(
        version=2, progress=PromptProgress(1, (0,)), unfinished=(UnfinishedGroup(0, 2, (), ()),)
    )

    async def body(world: World) -> None:
        old, new = world.servers
        world.push(old, 1)
        await asyncio.sleep(0.5)  # it looks for a server twice, and does not take this one
        assert world.dispatcher.in_flight == 0
        world.push(new, 2)
        batch = await asyncio.wait_for(world.producer.batch(2), 60)
        assert batch.closed == {}
        (group,) = (group for group in batch.groups if group.group_id == 0)
        assert group.server_url == new.url

    run_world(body, prompts=list("123456789"), max_staleness=2, num_servers=2, saved=saved)


def test_completions_in_flight_are_kept_with_a_checkpoint_and_completed_after_it(run_world):
    """Of the first group one completion is finished, one begun, and one has no token yet."""
    kept: list[SavedRollouts] = []
    finished, begun = [100], [101, 101]

    async def first(world: World) -> None:
        (server,) = world.servers
        write, num_started = server.generate, 0
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()

        async def hold_first_prompt(request: GenerateRequest) -> Generation:
            nonlocal num_started
            if request.prompt_ids[: len(first_prompt)] != first_prompt:
                return await write(request)
            if request.prompt_ids == first_prompt:
                num_started += 1
                if num_started <= 2:
                    tokens, reason = [(finished, "stop"), (begun, "length")][num_started - 1]
                    return generation(tokens, finish_reason=reason)
            await asyncio.Event().wait()
            raise AssertionError("held until the run is stopped")

        server.generate = hold_first_prompt  # pyright: ignore[reportAttributeAccessIssue]
        world.push(server, 0)
        async with asyncio.timeout(60):
            while True:
                saved = world.producer.save(0)
                groups = {group.group_id: group for group in saved.unfinished}
                if 0 in groups and groups[0].generations and groups[0].begun:
                    break
                await asyncio.sleep(0.01)
        assert [g.token_ids.tolist() for g in groups[0].generations] == [finished]
        assert [g.token_ids.tolist() for g in groups[0].begun] == [begun]
        assert groups[0].start_version == 0
        kept.append(saved)

    run_world(first, prompts=list("123456789"), max_staleness=2, segment_tokens=2)

    async def second(world: World) -> None:
        (server,) = world.servers
        write, started = server.generate, []
        first_prompt = world.prompts.prompt_at(0).token_ids.tolist()

        async def note(request: GenerateRequest) -> Generation:
            # Group 9 has the same prompt, in the second epoch.
            if request.prompt_ids == first_prompt and request.request_id.split("-")[1] == "0":
                started.append(request.request_id)
            return await write(request)

        server.generate = note  # pyright: ignore[reportAttributeAccessIssue]
        for version in range(3):
            world.push(server, version)
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            group = next((g for g in batch.groups if g.group_id == 0), None)
            if group is not None:
                break
        assert group is not None, "a group is trained within its staleness bound"
        written = [rollout.token_ids.tolist() for rollout in group.rollouts]
        assert finished in written
        assert begun in [tokens[: len(begun)] for tokens in written]
        assert len(started) == 1, "only the completion without a token is started anew"

    run_world(second, prompts=list("123456789"), max_staleness=2, segment_tokens=2, saved=kept[0])
