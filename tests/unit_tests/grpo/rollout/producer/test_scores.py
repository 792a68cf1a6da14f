# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups without scores, without an advantage, or that a user's function refuses; rows that are no prompts."""

from producer_world import GROUP_SIZE, GROUPS_PER_BATCH

from torchtitan.grpo.types import PromptProgress

CODE = """
def by_prompt(prompts, completions, **kw):
    if "0" in prompts[0]:
        raise ValueError("no zeros")
    return [None if i == 0 and "1" in prompts[0] else 1.0 for i in range(len(completions))]
def some_equal(prompts, completions, **kw):
    return [float(i) if "1" in prompts[0] else 1.0 for i in range(len(completions))]
def keep(prompts, completions, rewards, **kw):
    return [reward > 0 for reward in rewards]
"""


async def test_unscored_groups_are_replaced_and_unscored_rollouts_left_out(world_of):
    prompts = ["00", "11", "22"]
    async with world_of(prompts, max_staleness=0, code=CODE, reward="by_prompt") as world:
        world.push(0)
        batch = await world.batch(0)
        assert [group.prompt_text for group in batch.groups] == ["11", "22"]
        assert [len(group.rollouts) for group in batch.groups] == [GROUP_SIZE - 1, GROUP_SIZE]
        assert {r.reward for group in batch.groups for r in group.rollouts} == {2.0}
        assert batch.metrics["rollout/unscored_groups"] == 1
        assert batch.metrics["reward/by_prompt"] == 1.0
        assert batch.metrics["reward/mean"] == 2.0
        assert batch.metrics["reward/std"] == 0.0
        # The next prompt may have been drawn already.
        assert batch.progress in (PromptProgress(3), PromptProgress(4, (3,)))
        assert batch.closed == {0: "unscored"}
        rows = [batch.rows[0], *(group.row for group in batch.groups)]
        assert [row.rpartition("/")[2] for row in rows] == [f"prompts.jsonl:{i}" for i in (1, 2, 3)]
        left_out = [[(r.reward, r.unscored) for r in group.left_out] for group in batch.groups]
        assert left_out == [[(None, "function")], []]
        assert batch.metrics["rollout/unscored_by_function"] == 1 + GROUP_SIZE


async def test_groups_without_an_advantage_are_refilled_within_the_budget(world_of):
    prompts = ["1", "2", "3", "13", *"5678"]
    limit = {"dynamic_sampling": True, "dynamic_sampling_limit": 2 / GROUPS_PER_BATCH}
    async with world_of(
        prompts, max_staleness=0, code=CODE, reward="some_equal", filters=limit
    ) as world:
        world.push(0)
        first = await world.batch(0)
        assert [group.prompt_text for group in first.groups] == ["1", "13"]
        assert first.closed == {1: "filtered", 2: "filtered"}
        assert first.metrics["rollout/filtered_groups"] == 2
        assert first.metrics["rollout/equal_groups_dropped"] == 2
        world.push(1)
        second = await world.batch(1)
        # Of four equal ones two were left out, and the others are taken as they are.
        assert len(second.closed) == 2
        assert len(second.groups) == GROUPS_PER_BATCH


async def test_a_function_of_the_users_decides_what_is_kept(world_of):
    async with world_of(
        "12", max_staleness=0, code=CODE, reward="some_equal", acceptor="keep"
    ) as world:
        world.push(0)
        rewards = [[r.reward for r in group.rollouts] for group in (await world.batch(0)).groups]
        assert rewards == [[2.0, 4.0], [2.0] * GROUP_SIZE]


async def test_rows_that_are_no_prompts_are_closed_as_such_and_told_once(world_of, caplog):
    bad, too_long = [None, "", 5, True, [], [{}], {"a": 1}], "1" * 21
    prompts = ["1", "2", *bad, too_long]
    trained: list[int] = []
    closed: dict[int, str] = {}
    counts = [0.0, 0.0]
    async with world_of(prompts, max_staleness=0, num_held_out=2) as world:
        for version in range(5):
            world.push(version)
            batch = await world.batch(version)
            trained += [group.group_id for group in batch.groups]
            closed |= batch.closed
            counts[0] += batch.metrics["rollout/prompts_unusable"]
            counts[1] += batch.metrics["rollout/prompts_too_long"]
    known = sorted([*trained, *closed, *batch.progress.open])
    assert known == list(range(batch.progress.position))
    for index, reason in closed.items():
        assert reason == ("too long" if index % 10 == 9 else "unusable")
    assert [i for i in trained if i % 10 not in (0, 1)] == []
    # Those that were drawn after the last batch was delivered are counted with the next one.
    num_closed = list(closed.values()).count("unusable")
    assert 4 * len(bad) <= counts[0] <= num_closed + len(bad)
    assert counts[1] >= 4
    assert caplog.text.count("First of the prompts that cannot be used: ") == 1
    assert "prompts.jsonl:3: column 'prompt' (prompts.column) must be a string" in caplog.text
