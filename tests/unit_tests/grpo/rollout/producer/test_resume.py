# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
from collections.abc import Sequence

import pytest
from producer_world import GROUPS_PER_BATCH
from rollouts import generation, rollout
from rollouts import group as group_of

from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup
from torchtitan.grpo.types import GenerateRequest, Generation, PromptProgress, RolloutGroup


def ids_of(groups) -> set[int]:
    return {group.group_id for group in groups}


def tokens_of(groups) -> dict[int, list[list[int]]]:
    return {g.group_id: [r.token_ids.tolist() for r in g.rollouts] for g in groups}


async def test_rollouts_kept_with_a_checkpoint_continue_and_none_is_lost_or_generated_twice(
    world_of,
):
    async with world_of(max_staleness=2) as world:
        world.push(0)
        trained = [group.group_id for group in (await world.batch(0)).groups]
        while not (saved := world.producer.save(1)).finished:
            await asyncio.sleep(0.01)
    in_file = ids_of(saved.finished)
    assert in_file <= set(saved.progress.open)

    async with world_of(max_staleness=2, saved=saved) as world:
        world.push(1)
        for version in (1, 2, 3):
            batch = await world.batch(version)
            trained.extend(group.group_id for group in batch.groups)
            for group in batch.groups:
                ages = [version - rollout.oldest_version for rollout in group.rollouts]
                assert 0 <= min(ages) <= max(ages) <= 2
            world.push(version + 1)
        # What was finished before is in the first of these batches.
        assert in_file <= set(trained[2:])
        assert sorted([*trained, *batch.progress.open]) == list(range(batch.progress.position))


@pytest.mark.parametrize("num_parts", [1, 2])
async def test_a_batch_that_was_delivered_but_not_trained_is_kept(world_of, num_parts):
    """A run is stopped while its trainer holds a batch, or a part of one."""
    async with world_of(max_staleness=2, num_parts=num_parts) as world:
        world.push(0)
        batch = await world.batch(0)
        saved, delivered = world.producer.save(0), tokens_of(batch.groups)
    assert saved.version == 0
    assert delivered.keys() <= ids_of(saved.finished)
    assert delivered.keys() <= set(saved.progress.open)
    assert not delivered.keys() & saved.closed.keys()

    found = {}
    async with world_of(max_staleness=2, saved=saved) as world:
        # An older group that was not finished before may take the place of one in the first batch.
        for version in range(3):
            world.push(version)
            found |= tokens_of((await world.batch(version)).groups)
    assert {group_id: found[group_id] for group_id in delivered} == delivered


async def test_a_full_buffer_of_saved_groups_does_not_hold_up_what_their_batch_waits_for(world_of):
    """Prompt 0 has nothing saved and may not start; the batch needs group 4, behind it."""
    saved = SavedRollouts(
        version=2,
        progress=PromptProgress(5, (0, 1, 2, 4)),
        finished=tuple(group_of(i, *[rollout(2, version=2)] * 2) for i in (1, 2)),
        unfinished=(UnfinishedGroup(4, 0, (), ()),),
    )
    async with world_of(max_staleness=2, saved=saved, max_buffered=GROUPS_PER_BATCH) as world:
        world.push(2)
        batch = await world.batch(2)
        assert batch.closed == {}
        # Written under version 2 after all, it is due later than it was.
        assert ids_of(batch.groups) == {1, 2}
        assert 4 in ids_of((await world.batch(3)).groups)


async def test_a_saved_group_goes_on_only_on_servers_that_are_as_new_as_its_first(world_of):
    saved = SavedRollouts(
        version=2, progress=PromptProgress(1, (0,)), unfinished=(UnfinishedGroup(0, 2, (), ()),)
    )
    async with world_of(max_staleness=2, num_servers=2, saved=saved) as world:
        old, new = world.servers
        world.push(1, old)
        await asyncio.sleep(0.5)  # it looks for a server twice, and does not take this one
        assert world.dispatcher.in_flight == 0
        world.push(2, new)
        found: list[RolloutGroup] = []
        for version in (2, 3, 4):  # other groups may be finished first
            batch = await world.batch(version)
            assert batch.closed == {}
            found += [group for group in batch.groups if group.group_id == 0]
        assert [group.server_url for group in found] == [new.url]


async def test_completions_in_flight_are_kept_with_a_checkpoint_and_completed_after_it(world_of):
    """Three groups have one finished and one begun completion, one finished, and one begun."""
    finished, begun = [100], [101, 101]
    whole, part = generation(finished), generation(begun, finish_reason="length")
    answers = {}

    async def answer_in_part(request: GenerateRequest) -> Generation:
        if left := answers.get(tuple(request.prompt_ids)):
            return left.pop(0)
        return await asyncio.get_running_loop().create_future()

    def ids(generations: Sequence[Generation]) -> list[list[int]]:
        return [one.token_ids.tolist() for one in generations]

    async with world_of(max_staleness=2, segment_tokens=2) as world:
        for i, some in enumerate(([whole, part], [whole], [part])):
            answers[tuple(world.prompts.prompt_at(i).token_ids.tolist())] = some
        first_prompt = list(next(iter(answers)))
        world.intercept(answer_in_part)
        world.push(0)
        kept = []
        while kept != [(0, [finished], [begun]), (1, [finished], []), (2, [], [begun])]:
            await asyncio.sleep(0.01)
            saved = world.producer.save(0)
            kept = [(g.group_id, ids(g.generations), ids(g.begun)) for g in saved.unfinished]
    assert {group.start_version for group in saved.unfinished} == {0}
    started = []

    async def note(request: GenerateRequest) -> Generation:
        # Group 9 has the same prompt, in the second epoch.
        if request.prompt_ids == first_prompt and request.request_id.split("-")[1] == "0":
            started.append(request.request_id)
        return await write(request)

    async with world_of(max_staleness=2, segment_tokens=2, saved=saved) as world:
        write = world.intercept(note)
        groups = {}
        for version in range(3):  # a group is trained within its staleness bound
            world.push(version)
            groups |= {group.group_id: group for group in (await world.batch(version)).groups}
    written = [rollout.token_ids.tolist() for rollout in groups[0].rollouts]
    assert finished in written
    assert begun in [tokens[: len(begun)] for tokens in written]
    assert len(started) == 1, "only the completion without a token is started anew"
