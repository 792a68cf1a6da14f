# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Batches of the producer: how old their samples are, and in which order they come."""

import asyncio
import random

import numpy as np
import pytest
from producer_world import GROUP_SIZE, GROUPS_PER_BATCH, World

from torchtitan.grpo.rollout.longest_first import LengthRanker
from torchtitan.grpo.types import BatchPart, GenerateRequest, Generation, Prompt


@pytest.mark.parametrize(("segment_tokens", "num_parts"), [(0, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_bound_holds_over_random_servers_deaths_and_restarts(
    run_world, max_staleness: int, segment_tokens: int, num_parts: int
):
    async def body(world: World) -> None:
        rng = random.Random(max_staleness)
        for server in world.servers:
            world.push(server, 0)
        seen: set[int] = set()
        for version in range(12):
            parts = []
            while not parts or not parts[-1].part.ends_batch:
                parts.append(await asyncio.wait_for(world.producer.batch(version), 60))
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
                    world.push(server, version + 1)
                elif rng.random() < 0.5:
                    world.dispatcher.set_lost(server.url, "unlucky")
                elif rng.random() < 0.3:
                    server.served = -1  # restarted, and nobody has noticed
            world.push(world.servers[0], version + 1)

    run_world(
        body, prompts=list("123456789"), max_staleness=max_staleness, num_servers=3,
        failure_rate=0.02, segment_tokens=segment_tokens, num_parts=num_parts, seed=max_staleness,
    )  # fmt: skip


class Later(LengthRanker):
    """Finds that answers get longer and longer."""

    def predict(self, prompt: Prompt) -> float:
        return float(prompt.group_id)


def test_prompts_with_long_answers_are_started_first_among_those_of_a_batch(run_world):
    async def body(world: World) -> None:
        asked, write = [], world.servers[0].generate

        async def note(request: GenerateRequest) -> Generation:
            asked.append(int(request.request_id.split("-")[1]))
            return await write(request)

        world.servers[0].generate = note  # pyright: ignore[reportAttributeAccessIssue]
        for version in range(3):
            world.push(world.servers[0], version)
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            # The set of prompts is that of the stream; their order is not.
            ids = [group.group_id for group in batch.groups]
            assert ids == [2 * version, 2 * version + 1]
            assert list(dict.fromkeys(asked))[2 * version :][:2] == ids[::-1]

    run_world(body, prompts=list("123456789"), max_staleness=0, ranker=Later(4.0))


def test_a_batch_comes_in_parts_before_its_last_group_is_there(run_world):
    async def body(world: World) -> None:
        server, go_on = world.servers[0], asyncio.Event()
        write = server.generate

        async def hold_back(request: GenerateRequest) -> Generation:
            prompts.append(list(request.prompt_ids))
            if prompts[-1] != prompts[0]:
                await go_on.wait()
            return await write(request)

        prompts: list[list[int]] = []
        server.generate = hold_back
        world.push(server, 0)
        first = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [group.prompt_text for group in first.groups] == ["1"]
        assert first.part is BatchPart.FIRST
        assert {0, 1} <= set(first.progress.open), "not trained before the batch is whole"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.producer.batch(0), 0.2)
        go_on.set()
        last = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [group.prompt_text for group in last.groups] == ["2"]
        assert last.part is BatchPart.LAST
        assert not {0, 1} & set(last.progress.open)
        assert first.metrics == {}
        rewards = [r.reward for part in (first, last) for g in part.groups for r in g.rollouts]
        assert last.metrics["reward/mean"] == np.mean(rewards)

    run_world(body, prompts=list("12"), max_staleness=0, num_parts=2)
