# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A producer with real prompts, tokenizer, and reward workers, and servers that misbehave."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from stub_clients import StubClient

from torchtitan.grpo.config import GRPO, Prompts, Reward, Rollout
from torchtitan.grpo.config.evaluation import EvaluationSet
from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.evaluator import Evaluator, HeldOut
from torchtitan.grpo.rollout.judging import GroupJudge, Rules
from torchtitan.grpo.rollout.ledger import Ledger
from torchtitan.grpo.rollout.longest_first import LengthRanker
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream, first_prompts
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.rollout.saved import SavedRollouts
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import GenerateRequest, Generation, PromptProgress, VersionSegment

Generate = Callable[[GenerateRequest], Awaitable[Generation]]
GROUP_SIZE = 3
GROUPS_PER_BATCH = 2
GROUPS = GRPO(group_size=GROUP_SIZE, prompts_per_step=GROUPS_PER_BATCH)


class RandomServer(StubClient):
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


@dataclass
class World:
    """A producer and its surroundings; ``work`` is the task in which it runs."""

    servers: list[RandomServer]
    dispatcher: Dispatcher
    producer: Producer
    evaluator: Evaluator
    prompts: PromptStream
    work: Any = None
    may_end: bool = False

    def push(self, version: int, server: RandomServer | None = None) -> None:
        """Gives this version to the first server, or to the given one."""
        server = server or self.servers[0]
        server.served = version
        self.dispatcher.set_version(server.url, version)

    async def batch(self, version: int) -> RolloutBatch:
        return await asyncio.wait_for(self.producer.batch(version), 60)

    def intercept(self, generate: Generate) -> Generate:
        """Makes the first server answer by this function; returns the method that it replaces."""
        before = self.servers[0].generate
        self.servers[0].generate = generate  # pyright: ignore[reportAttributeAccessIssue]
        return before


@dataclass(frozen=True)
class Settings:
    max_staleness: int
    num_servers: int = 1
    failure_rate: float = 0.0
    reward: str = "exact_match"
    seed: int = 0
    acceptor: str | None = None
    filters: dict[str, Any] = field(default_factory=dict)
    overdue: Literal["wait", "drop", "resume"] = "wait"
    num_parts: int = 1
    segment_tokens: int = 0
    saved: SavedRollouts | None = None
    max_buffered: int | None = None
    ranker: LengthRanker | None = None
    num_held_out: int = 0


@asynccontextmanager
async def at_work(file: Path, model: Path, settings: Settings) -> AsyncIterator[World]:
    """Yields a world whose producer is at work, and must not end unless ``may_end`` is set."""
    codec = TextCodec(str(model), [1])
    acceptors = [settings.acceptor] if settings.acceptor is not None else []
    pool = RewardPool(
        [settings.reward, "exact_match", *acceptors], Reward(max_consecutive_failures=1000)
    )
    await pool.start()
    try:
        world = make_world(file, codec, pool, settings)
        world.work = asyncio.create_task(world.producer.run())
        try:
            yield world
            assert world.may_end or not world.work.done()
        finally:
            world.work.cancel()
            await asyncio.gather(world.work, return_exceptions=True)
    finally:
        await pool.close()


def make_world(file: Path, codec: TextCodec, pool: RewardPool, settings: Settings) -> World:
    table = Prompts(path=str(file), shuffle=False)
    rows = open_table(table.path, "train", {}, "prompt", "prompts.path")
    prompts = PromptSet(rows, table, codec, PromptLimits(20, 128), "prompts.path")
    rng = random.Random(settings.seed)
    servers = [
        RandomServer(f"http://{i}", rng, settings.failure_rate) for i in range(settings.num_servers)
    ]
    dispatcher = Dispatcher(servers, rollout_of(settings), vocab_size=128)
    sampling = Sampling(6, 26, 1.0, 1.0, -1, (1,))
    producer, stream = make_producer(prompts, codec, pool, dispatcher, sampling, settings)
    room = SpareSlots(dispatcher, 0, 12)
    held = HeldOut(
        "heldout",
        EvaluationSet(path=str(file)),
        first_prompts(prompts, settings.num_held_out)[0],
        1,
        TrajectoryWriter(room, replace(sampling, temperature=0.0), rollout_of(settings)),
    )
    evaluator = Evaluator([held], dispatcher, room, pool, codec)
    return World(servers, dispatcher, producer, evaluator, stream)


def rollout_of(settings: Settings) -> Rollout:
    return Rollout(
        max_head_offpolicyness=settings.max_staleness,
        max_concurrent_rollouts=12,
        buffer_size_limit=(settings.max_buffered or 10**6) * GROUP_SIZE,
        request_timeout_seconds=30,
        max_consecutive_failures=1000,
        adaptive_concurrency=False,
        segment_tokens=settings.segment_tokens,
        overdue=settings.overdue,
        stream=settings.num_parts > 1,
        stream_parts=settings.num_parts,
        **settings.filters,
    )


def make_producer(
    prompts: PromptSet,
    codec: TextCodec,
    pool: RewardPool,
    dispatcher: Dispatcher,
    sampling: Sampling,
    settings: Settings,
) -> tuple[Producer, PromptStream]:
    saved = settings.saved
    progress = saved.progress if saved is not None else PromptProgress()
    kept = saved.group_ids if saved is not None else set()
    stream = PromptStream(
        [prompts],
        seed=0,
        shuffle=False,
        position=progress.position,
        pending=[index for index in progress.open if index not in kept],
    )
    rollout = rollout_of(settings)
    admission = Admission(GROUPS, rollout, saved.version if saved is not None else 0)
    scorer = Scorer(pool, codec, [settings.reward], [2.0], settings.acceptor)
    producer = Producer(
        stream,
        admission,
        dispatcher,
        GroupJudge({"": Rules(scorer, rollout)}, rollout, GROUPS),
        Ledger(progress),
        {"": TrajectoryWriter(dispatcher, sampling, rollout)},
        GROUPS,
        rollout,
        saved=saved,
        ranker=settings.ranker,
    )
    return producer, stream
