# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each rank fetches its own rollouts and gets the same rows as if rank 0 had sent them."""

import asyncio
import threading

import numpy as np
import torch
import torch.distributed as dist
import zmq.asyncio

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.feed import Feed, FetchAddress, TrainBatch
from torchtitan.grpo.data.step_plan import plan_step
from torchtitan.grpo.rollout.batch_fetch import BatchHolder, FetchFailed
from torchtitan.grpo.rollout.codec import pack_without_arrays, unpack
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, VersionSegment

NUM_BATCH_RANKS, ROW_LEN, SECRET = 2, 32, "secret"


def random_groups(seed: int) -> list[RolloutGroup]:
    random = np.random.default_rng(seed)

    def rollout(prompt: np.ndarray) -> Rollout:
        length = int(random.integers(1, 20))
        sampled = random.random(length) < 0.7 if random.random() < 0.5 else None
        return Rollout(
            prompt_ids=prompt,
            token_ids=random.integers(0, 99, length).astype(np.int32),
            logprobs=-random.random(length).astype(np.float32),
            segments=(VersionSegment(0, 0, length),),
            finish_reason="stop",
            completion="text",
            reward=float(random.random()),
            sampled=sampled,
            new_rows=((1, 1),) if length > 3 else (),
            teacher_logprobs=-random.random(length).astype(np.float32),
            teacher_top_ids=random.integers(0, 99, (length, 2)).astype(np.int32),
            teacher_top_logprobs=-random.random((length, 2)).astype(np.float32),
        )

    groups = []
    for group_id in range(5):
        prompt = random.integers(0, 99, int(random.integers(1, 9))).astype(np.int32)
        groups.append(RolloutGroup(group_id, "p", tuple(rollout(prompt) for _ in range(4)), "u"))
    return groups


def plan(groups):
    return plan_step(
        groups, GRPO(num_minibatches=2, group_size=4), version=0, num_ranks=NUM_BATCH_RANKS,
        row_len=ROW_LEN, local_batch_size=2, max_new_tokens=20, balance=True, cost=token_cost,
        row_bucket=1,
    )  # fmt: skip


class Sharing:
    """A share server with an event loop of its own, as in the rollout process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sharing")
        self._thread.start()
        self.server = self._call(self._open())
        self._running = asyncio.run_coroutine_threadsafe(self.server.run(), self._loop)

    async def _open(self) -> BatchHolder:
        self._context = zmq.asyncio.Context()
        return BatchHolder(self._context, "127.0.0.1", SECRET)

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        async def end() -> None:
            self.server.close()
            self._context.term()

        self._running.cancel()
        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


def equal(a: TrainBatch, b: TrainBatch) -> bool:
    same = all(
        torch.equal(value.nan_to_num(7), other.tensors()[name].nan_to_num(7))
        and value.dtype == other.tensors()[name].dtype
        for one, other in zip(a.minibatches, b.minibatches, strict=True)
        for name, value in one.tensors().items()
    )
    return same and a.minibatch_tokens == b.minibatch_tokens and a.num_tokens == b.num_tokens


def main(arguments):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    feed = Feed(rank // 2, ROW_LEN, timeout_seconds=60, fetch_seconds=30)
    sharing = Sharing() if rank == 0 else None
    results = []
    for seed in range(3):
        if sharing is None:
            sent, fetched = feed.receive(), feed.receive()
        else:
            groups = random_groups(seed)
            sharing.server.hold(seed, groups)
            sent = feed.send_step(plan(groups), 0, PromptProgress())
            # Rank 0 plans without the arrays.
            bare = unpack(pack_without_arrays(groups, 0), list[RolloutGroup])
            assert not any(r.token_ids.any() for g in bare for r in g.rollouts)
            address = FetchAddress(sharing.server.endpoint, SECRET, seed)
            fetched = feed.send_step(plan(bare), 0, PromptProgress(), address)
        assert isinstance(sent, TrainBatch) and isinstance(fetched, TrainBatch)
        trained = sum(int(rows.loss_mask.sum()) for rows in fetched.minibatches)
        results.append([equal(sent, fetched), trained > 0])
    refused = ""
    assert feed._client is not None
    try:
        feed._client.fetch(0, [0], 30)
    except FetchFailed as error:
        refused = str(error)
    dist.barrier()
    feed.close()
    if sharing is not None:
        sharing.close()
    return {"results": results, "refused": refused}
