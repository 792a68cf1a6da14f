# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the producer does with groups without scores, without an advantage, or that a user's function refuses."""

import asyncio
from pathlib import Path

from producer_world import GROUP_SIZE, GROUPS_PER_BATCH, REWARD, World

from torchtitan.grpo.rollout.judging import WasteBudget
from torchtitan.grpo.types import PromptProgress

SOME_EQUAL = """
def rewards(prompts, completions, **kw):
    return [float(i) if "1" in prompts[0] else 1.0 for i in range(len(completions))]
def keep(prompts, completions, rewards, **kw):
    return [reward > 0 for reward in rewards]
"""


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
        # The next prompt may have been drawn already.
        assert batch.progress in (PromptProgress(3), PromptProgress(4, (3,)))
        assert batch.closed == {0: "unscored"}

    reward = f"{tmp_path / 'mine.py'}:by_prompt"
    run_world(body, prompts=["00", "11", "22"], max_staleness=0, reward=reward)


def test_groups_without_an_advantage_are_refilled_within_the_budget(run_world, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SOME_EQUAL)

    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        first = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [group.prompt_text for group in first.groups] == ["1", "13"]
        assert first.closed == {1: "filtered", 2: "filtered"}
        assert first.metrics["rollout/filtered_groups"] == 2
        assert first.metrics["rollout/equal_groups_dropped"] == 2
        world.push(world.servers[0], 1)
        second = await asyncio.wait_for(world.producer.batch(1), 60)
        # Of four equal ones two were left out, and the others are taken as they are.
        assert len(second.closed) == 2
        assert len(second.groups) == GROUPS_PER_BATCH

    reward, prompts = f"{tmp_path / 'mine.py'}:rewards", ["1", "2", "3", "13", *"5678"]
    run_world(body, prompts=prompts, max_staleness=0, reward=reward, waste=WasteBudget(2))


def test_a_function_of_the_users_decides_what_is_kept(run_world, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SOME_EQUAL)

    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [[r.reward for r in group.rollouts] for group in batch.groups] == [
            [2.0, 4.0],
            [2.0] * GROUP_SIZE,
        ]

    reward, acceptor = (f"{tmp_path / 'mine.py'}:{name}" for name in ("rewards", "keep"))
    run_world(body, prompts=["1", "2"], max_staleness=0, reward=reward, acceptor=acceptor)


def test_rows_that_are_no_prompts_are_closed_as_such_and_told_once(run_world, caplog):
    bad = [None, "", 5, True, [], [{}], {"a": 1}]
    long = "1" * 21

    async def body(world: World) -> None:
        trained: list[int] = []
        closed: dict[int, str] = {}
        counts = [0.0, 0.0]
        for version in range(5):
            world.push(world.servers[0], version)
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            trained += [group.group_id for group in batch.groups]
            closed |= batch.closed
            counts[0] += batch.metrics["rollout/prompts_unusable"]
            counts[1] += batch.metrics["rollout/prompts_too_long"]
        still_open = list(batch.progress.open)
        assert sorted([*trained, *closed, *still_open]) == list(range(batch.progress.position))
        for index, reason in closed.items():
            assert reason == ("too long" if index % 10 == 9 else "unusable")
        assert [i for i in trained if i % 10 not in (0, 1)] == []
        reasons = list(closed.values())
        # Those that were drawn after the last batch was delivered are counted with the next one.
        assert counts[0] <= reasons.count("unusable") + len(bad) and counts[0] >= 4 * len(bad)
        assert counts[1] >= 4

    run_world(body, prompts=["1", "2", *bad, long], max_staleness=0, num_held_out=2)
    assert caplog.text.count("First of the prompts that cannot be used: ") == 1
    assert "prompts.jsonl:3: column 'prompt' (prompts.column) must be a string" in caplog.text
