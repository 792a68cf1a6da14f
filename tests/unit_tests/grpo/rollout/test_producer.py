# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The producer with real prompts, tokenizer, reward workers, and servers that misbehave."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerLoad
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.evaluation import Evaluator, HeldOut, SpareRoom
from torchtitan.grpo.rollout.judging import GroupJudge
from torchtitan.grpo.rollout.ledger import Ledger
from torchtitan.grpo.rollout.producer import OverduePolicy, Producer
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream, first_prompts
from torchtitan.grpo.rollout.ranker import LengthRanker
from torchtitan.grpo.rollout.rollout_filters import CompletionFilter, WasteBudget
from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup
from torchtitan.grpo.rollout.scoring import Scorer, weighted_sum
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import (
    BatchPart,
    GenerateRequest,
    Generation,
    Prompt,
    PromptProgress,
    Rollout,
    RolloutGroup,
    VersionSegment,
)

GROUP_SIZE = 3
GROUPS_PER_BATCH = 2

REWARD = """
def by_prompt(prompts, completions, **kw):
    if "0" in prompts[0]:
        raise ValueError("no zeros")
    return [None if i == 0 and "1" in prompts[0] else 1.0 for i in range(len(completions))]
"""


class RandomServer(InferenceClient):
    """Writes after a random number of turns of the loop, under the version it is set to."""

    def __init__(self, url: str, rng: random.Random, failure_rate: float) -> None:
        self.url = url
        self.rng = rng
        self.failure_rate = failure_rate
        self.served = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        first = self.served
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
        if self.rng.random() < self.failure_rate:
            raise ServerError(f"{self.url}: unlucky")
        length = self.rng.randint(1, request.max_new_tokens)
        segments = (VersionSegment(first, 0, 1), VersionSegment(self.served, 1, length))
        return Generation(
            np.array(request.prompt_ids[:1] * length, np.int32),
            np.full(length, -0.5, np.float32),
            "length" if length == request.max_new_tokens else "stop",
            segments if length > 1 else segments[:1],
        )

    async def load(self) -> ServerLoad:
        raise ServerError(f"{self.url} does not say")

    async def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this server only generates")

    abort = health = version = num_workers = pause = resume = _none
    describe = join_weight_group = leave_weight_groups = begin_update = _none
    receive_bucket = commit_update = update_from_disk = rate = close = _none


@dataclass
class World:
    """A producer and what is around it."""

    servers: list[RandomServer]
    dispatcher: Dispatcher
    producer: Producer
    evaluator: Evaluator
    prompts: PromptStream

    def push(self, server: RandomServer, version: int) -> None:
        server.served = version
        self.dispatcher.set_version(server.url, version)


@pytest.fixture
def run_world(repository: Path, tmp_path: Path):
    """Runs a test's body while a producer of the given settings is at work."""

    def run(
        body: Callable[[World], Awaitable[None]],
        *,
        prompts: list[str],
        max_staleness: int,
        num_servers: int = 1,
        failure_rate: float = 0.0,
        reward: str = "exact_match",
        seed: int = 0,
        acceptor: str | None = None,
        completion_filter: CompletionFilter | None = None,
        waste: WasteBudget | None = None,
        overdue: OverduePolicy = "wait",
        num_parts: int = 1,
        segment_tokens: int = 0,
        saved: SavedRollouts | None = None,
        max_buffered: int | None = None,
        ranker: LengthRanker | None = None,
        evaluation_function: int = 1,
    ) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "answer": "7"}) + "\n" for p in prompts))
        codec = TextCodec(str(repository / "assets/reverse_digits/model"), [1])
        table = Prompts(path=str(file), shuffle=False)
        rows = open_table(table.path, "train", {}, "prompt", "prompts.path")
        prompt_set = PromptSet(rows, table, codec, PromptLimits(20, 128), "prompts.path")
        rng = random.Random(seed)

        progress = saved.progress if saved is not None else PromptProgress()
        kept = saved.group_ids if saved is not None else set()
        pending = [index for index in progress.open if index not in kept]
        position = progress.position
        ledger = Ledger(progress)

        async def main() -> None:
            pool = RewardPool(
                [reward, "exact_match", *([acceptor] if acceptor is not None else [])],
                num_workers=1,
                timeout_seconds=30,
                max_consecutive_failures=1000,
            )
            await pool.start()
            servers = [RandomServer(f"http://{i}", rng, failure_rate) for i in range(num_servers)]
            dispatcher = Dispatcher(
                servers, vocab_size=128, request_timeout_seconds=30, max_consecutive_failures=1000
            )
            admission = Admission(
                groups_per_batch=GROUPS_PER_BATCH,
                max_staleness=max_staleness,
                group_size=GROUP_SIZE,
                max_concurrent_rollouts=12,
                max_buffered=max_buffered,
                start_version=saved.version if saved is not None else 0,
            )
            sampling = Sampling(6, 26, 1.0, 1.0, -1, (1,))
            stream = PromptStream(
                prompt_set, seed=0, shuffle=False, position=position, pending=pending
            )
            producer = Producer(
                stream,
                admission,
                dispatcher,
                GroupJudge(
                    Scorer(pool, codec, [reward], [2.0], 2 if acceptor is not None else None),
                    completion_filter,
                    waste,
                ),
                ledger,
                TrajectoryWriter(dispatcher, sampling, segment_tokens=segment_tokens),
                group_size=GROUP_SIZE,
                num_parts=num_parts,
                overdue=overdue,
                saved=saved,
                ranker=ranker,
                window=GROUPS_PER_BATCH,
            )
            held_out, _ = first_prompts(prompt_set, 0)
            room = SpareRoom(dispatcher, 0, 12)
            greedy = replace(sampling, temperature=0.0)
            held = HeldOut(
                "heldout",
                EvaluationSet(path=str(file)),
                held_out,
                evaluation_function,
                TrajectoryWriter(room, greedy),
            )
            evaluator = Evaluator([held], dispatcher, room, pool, codec)
            work = asyncio.create_task(producer.run())
            try:
                await body(World(servers, dispatcher, producer, evaluator, stream))
                assert not work.done()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await pool.close()

        asyncio.run(main())

    return run


@pytest.mark.parametrize("segment_tokens", [0, 2])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_bound_holds_over_random_servers_deaths_and_restarts(
    run_world, max_staleness: int, segment_tokens: int
):
    num_steps = 12

    async def body(world: World) -> None:
        rng = random.Random(max_staleness)
        for server in world.servers:
            world.push(server, 0)
        seen: set[int] = set()
        for version in range(num_steps):
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            assert len(batch.groups) == GROUPS_PER_BATCH
            for group in batch.groups:
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
        body,
        prompts=list("123456789"),
        max_staleness=max_staleness,
        num_servers=3,
        failure_rate=0.02,
        segment_tokens=segment_tokens,
        seed=max_staleness,
    )


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


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_bound_holds_for_batches_in_parts(run_world, max_staleness: int):
    async def body(world: World) -> None:
        rng = random.Random(max_staleness)
        for server in world.servers:
            world.push(server, 0)
        seen: set[int] = set()
        for version in range(8):
            parts = []
            while not parts or not parts[-1].part.ends_batch:
                parts.append(await asyncio.wait_for(world.producer.batch(version), 60))
            assert [part.part for part in parts] == [BatchPart.FIRST, BatchPart.LAST]
            for group in (group for part in parts for group in part.groups):
                assert group.group_id not in seen
                seen.add(group.group_id)
                ages = [version - rollout.oldest_version for rollout in group.rollouts]
                assert 0 <= min(ages) <= max(ages) <= max_staleness
            for server in world.servers:
                if server is world.servers[0] or rng.random() < 0.5:
                    world.push(server, version + 1)

    run_world(
        body, prompts=list("123456789"), max_staleness=max_staleness, num_servers=3, num_parts=2
    )


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

    run_world(
        body,
        prompts=["00", "11", "22"],
        max_staleness=0,
        reward=f"{tmp_path / 'mine.py'}:by_prompt",
    )


def test_trainer_out_of_step_is_refused(run_world):
    async def body(world: World) -> None:
        with pytest.raises(RuntimeError, match=r"asked for the batch of version 3.* out of step"):
            await world.producer.batch(3)

    run_world(body, prompts=["1"], max_staleness=0)


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


def test_reward_is_the_weighted_sum_of_what_applies():
    assert weighted_sum([1.0, 0.5], [2.0, 4.0]) == 4.0
    assert weighted_sum([None, 0.5], [2.0, 4.0]) == 2.0
    assert weighted_sum([None, None], [2.0, 4.0]) is None


SOME_EQUAL = """
def rewards(prompts, completions, **kw):
    return [float(i) if "1" in prompts[0] else 1.0 for i in range(len(completions))]
def keep(prompts, completions, rewards, **kw):
    return [reward > 0 for reward in rewards]
"""


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

    run_world(
        body,
        prompts=["1", "2", "3", "13", "5", "6", "7", "8"],
        max_staleness=0,
        reward=f"{tmp_path / 'mine.py'}:rewards",
        waste=WasteBudget(2),
    )


def test_a_function_of_the_users_decides_what_is_kept(run_world, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SOME_EQUAL)

    async def body(world: World) -> None:
        world.push(world.servers[0], 0)
        batch = await asyncio.wait_for(world.producer.batch(0), 60)
        assert [[r.reward for r in group.rollouts] for group in batch.groups] == [
            [2.0, 4.0],
            [2.0] * GROUP_SIZE,
        ]

    run_world(
        body,
        prompts=["1", "2"],
        max_staleness=0,
        reward=f"{tmp_path / 'mine.py'}:rewards",
        acceptor=f"{tmp_path / 'mine.py'}:keep",
    )


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


def finished_group(group_id: int, version: int) -> RolloutGroup:
    tokens = np.array([5, 6], np.int32)
    rollout = Rollout(
        tokens, tokens, np.full(2, -0.5, np.float32), (VersionSegment(version, 0, 2),), "stop", "7", 1.0
    )  # fmt: skip
    return RolloutGroup(group_id, "5", (rollout, rollout), "http://0")


def test_a_full_buffer_of_saved_groups_does_not_hold_up_what_their_batch_waits_for(run_world):
    """Prompt 0 has nothing saved and may not start; the batch needs group 4, behind it."""
    saved = SavedRollouts(
        version=2,
        progress=PromptProgress(5, (0, 1, 2, 4)),
        finished=(finished_group(1, 2), finished_group(2, 2)),
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
        version=2,
        progress=PromptProgress(1, (0,)),
        unfinished=(UnfinishedGroup(0, 2, (), ()),),
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
            return Generation(
                np.full(length, 5 + server.served, np.int32),
                np.full(length, -0.5, np.float32),
                "length",
                (VersionSegment(server.served, 0, length),),
            )

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
            assert [r.completion_ids.tolist() for r in groups[0].rollouts] == [[5, 5]] * GROUP_SIZE
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
            assert rollout.completion_ids[:2].tolist() == [5, 5]
            assert rollout.sampled is not None
            assert rollout.sampled.tolist() == [False, False] + [True] * 4
            assert rollout.generator_logprobs[:2].tolist() == [0, 0]
            # To a penalty of its length it is as long as what was written.
            assert (rollout.num_context, rollout.num_written) == (2, 6)
            assert rollout.segments[0].version == 0
            assert version - 1 - rollout.oldest_version <= 1

    run_world(body, prompts=list("123456789"), max_staleness=1, overdue=overdue, segment_tokens=2)


def test_prompts_with_long_answers_are_started_first_among_those_of_a_batch(run_world):
    async def body(world: World) -> None:
        (server,) = world.servers
        asked: list[int] = []
        write = server.generate

        async def note(request: GenerateRequest) -> Generation:
            asked.append(int(request.request_id.split("-")[1]))
            return await write(request)

        server.generate = note  # pyright: ignore[reportAttributeAccessIssue]
        for version in range(3):
            world.push(server, version)
            batch = await asyncio.wait_for(world.producer.batch(version), 60)
            # The set of prompts is that of the stream; their order is not.
            ids = [group.group_id for group in batch.groups]
            assert ids == [2 * version, 2 * version + 1]
            assert list(dict.fromkeys(asked))[2 * version :][:2] == ids[::-1]

    class Later(LengthRanker):
        """Finds that answers get longer and longer."""

        def predict(self, prompt: Prompt) -> float:
            return float(prompt.index)

    run_world(body, prompts=list("123456789"), max_staleness=0, ranker=Later(4.0))


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

    run_world(
        body,
        prompts=["00", "11", "22"],
        max_staleness=0,
        reward=f"{tmp_path / 'mine.py'}:by_prompt",
        evaluation_function=0,
    )


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
                    return Generation(
                        np.array(tokens, np.int32),
                        np.full(len(tokens), -0.5, np.float32),
                        reason,  # pyright: ignore[reportArgumentType]
                        (VersionSegment(0, 0, len(tokens)),),
                    )
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
        written = [rollout.completion_ids.tolist() for rollout in group.rollouts]
        assert finished in written
        assert begun in [tokens[: len(begun)] for tokens in written]
        assert len(started) == 1, "only the completion without a token is started anew"

    run_world(second, prompts=list("123456789"), max_staleness=2, segment_tokens=2, saved=kept[0])


def test_a_group_is_kept_with_a_checkpoint_whatever_there_is_of_its_completions(run_world):
    """Of one group a completion is finished, of the next one is begun, of a third there is none."""
    finished, begun = [100], [101, 101]

    async def body(world: World) -> None:
        (server,) = world.servers
        prompts = [world.prompts.prompt_at(i).token_ids.tolist() for i in range(2)]
        parts = {0: (finished, "stop"), 1: (begun, "length")}

        async def write_one_part_each(request: GenerateRequest) -> Generation:
            group = prompts.index(request.prompt_ids) if request.prompt_ids in prompts else None
            if group not in parts:
                await asyncio.Event().wait()
                raise AssertionError("held until the run is stopped")
            tokens, reason = parts.pop(group)
            return Generation(
                np.array(tokens, np.int32),
                np.full(len(tokens), -0.5, np.float32),
                reason,  # pyright: ignore[reportArgumentType]
                (VersionSegment(0, 0, len(tokens)),),
            )

        server.generate = write_one_part_each  # pyright: ignore[reportAttributeAccessIssue]
        world.push(server, 0)
        async with asyncio.timeout(60):
            while len(saved := world.producer.save(0).unfinished) < 2:
                await asyncio.sleep(0.01)
        kept = [
            (
                g.group_id,
                *([x.token_ids.tolist() for x in part] for part in (g.generations, g.begun)),
            )
            for g in saved
        ]
        assert kept == [(0, [finished], []), (1, [], [begun])]

    run_world(body, prompts=list("123456789"), max_staleness=2, segment_tokens=2)


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
