# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Batches, sent and fetched, a signal and metrics; every rank returns whether they are right."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import zmq.asyncio
from rollouts import rollout as rollout_of

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.feed import Feed, FetchAddress, Signal, TrainBatch
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.data.step_plan import plan_step
from torchtitan.grpo.losses.loss_metrics import Metric, MetricTotals
from torchtitan.grpo.rollout.batch_fetch import BatchHolder, FetchFailed
from torchtitan.grpo.rollout.codec import pack_without_arrays, unpack
from torchtitan.grpo.types import BatchPart, PromptProgress, Rollout, RolloutGroup

NUM_BATCH_RANKS, ROW_LEN, SECRET = 2, 32, "secret"
TOP_K, NUM_GROUPS = (0, 3, 2), (5, 1, 3)
PARTS = (BatchPart.FIRST, BatchPart.MIDDLE, BatchPart.LAST)


def random_groups(seed: int) -> list[RolloutGroup]:
    top_k = TOP_K[seed]
    random = np.random.default_rng(seed)

    def rollout(prompt: np.ndarray) -> Rollout:
        length = int(random.integers(1, 20))
        sampled = random.random(length) < 0.7 if random.random() < 0.5 else None
        top = {} if not top_k else {
            "teacher_top_ids": random.integers(0, 99, (length, top_k)).astype(np.int32),
            "teacher_top_logprobs": -random.random((length, top_k)).astype(np.float32),
        }  # fmt: skip
        return rollout_of(
            random.integers(0, 99, length), float(random.random()), -random.random(length),
            prompt_ids=prompt, sampled=sampled, new_rows=((1, 1),) if length > 3 else (),
            teacher_logprobs=-random.random(length).astype(np.float32), **top,
        )  # fmt: skip

    groups = []
    # Neighbors among far-off ids: a table that went through float would lose them.
    for group_id in range(2**60, 2**60 + NUM_GROUPS[seed]):
        prompt = random.integers(0, 99, int(random.integers(1, 9))).astype(np.int32)
        groups.append(RolloutGroup(group_id, "p", tuple(rollout(prompt) for _ in range(4)), "u"))
    return groups


def plan(groups):
    return plan_step(
        groups, GRPO(num_minibatches=2, group_size=4), num_ranks=NUM_BATCH_RANKS,
        row_len=ROW_LEN, local_batch_size=2, max_new_tokens=20, balance=True, cost=token_cost,
        row_bucket=1, shares_contexts=True,
    )  # fmt: skip


class Sharing:
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


def are_equal(ours: list[TrainRows], others: list[TrainRows]) -> bool:
    return all(
        one.tensors().keys() == other.tensors().keys()
        and all(
            torch.equal(value.nan_to_num(7), other.tensors()[name].nan_to_num(7))
            and value.dtype == other.tensors()[name].dtype
            for name, value in one.tensors().items()
        )
        for one, other in zip(ours, others, strict=True)
    )


def progress(step: int) -> PromptProgress:
    return PromptProgress(7 + step, tuple(range(step)))


def wrong_fields(batch: TrainBatch, step: int, batch_rank: int) -> list[str]:
    """What differs from the plan, which each rank can make: the groups follow from the step."""
    made = plan(random_groups(step))
    rows = made.rows_of_rank[batch_rank]
    # Advantages do not travel: each rank computes its own.
    rows = replace(rows, advantages=torch.zeros_like(rows.advantages))
    expected = list(rows.microbatches(rows.num_rows // made.num_minibatches))
    table = vars(made.samples).items()
    checks = {
        "rows": are_equal(batch.minibatches, expected),
        "samples": all(vars(batch.samples)[k].tobytes() == v.tobytes() for k, v in table),
        "counts": (batch.num_trained_tokens, batch.num_tokens, batch.minibatch_tokens, batch.mass)
        == (made.num_trained_tokens, made.num_tokens, made.minibatch_tokens, made.mass),
        "slot and progress": (batch.publish_slot, batch.progress) == (step, progress(step)),
        "part": batch.part is PARTS[step],
        "trained": batch.num_trained_tokens > 0,
    }
    return [name for name, is_right in checks.items() if not is_right]


def combined_metrics(feed: Feed, rank: int) -> dict[str, float]:
    reductions = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "loss": "loss"}
    totals = MetricTotals(reductions)
    if rank < dist.get_world_size() - 1:
        one, value = torch.tensor(1.0), torch.tensor(-2.0 - rank)
        numbers = dict.fromkeys(reductions, (value,)) | {"mean": (value, one)}
        totals.add([{name: Metric(reductions[name], numbers[name]) for name in reductions}])
    norm = feed.all_reduce_metrics(totals, torch.tensor(5.0 + rank))
    return totals.values(num_optimizer_steps=2) | {"norm of rank 0": norm}


def main(arguments):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Ranks 0 and 1 share a data-parallel coordinate, as tensor-parallel ranks do.
    feed = Feed(rank // 2, ROW_LEN, timeout_seconds=60, fetch_seconds=30)
    sharing = Sharing() if rank == 0 else None
    wrong = []
    for step in range(len(PARTS)):
        if sharing is None:
            sent, fetched = feed.receive(), feed.receive()
        else:
            groups = random_groups(step)
            sharing.server.hold(step, groups)
            sent = feed.send_step(plan(groups), step, progress(step), part=PARTS[step])
            # Rank 0 plans without the arrays.
            bare = unpack(pack_without_arrays(groups, 0), list[RolloutGroup])
            assert not any(r.token_ids.any() for g in bare for r in g.rollouts)
            address = FetchAddress(sharing.server.endpoint, SECRET, step)
            fetched = feed.send_step(plan(bare), step, progress(step), address, part=PARTS[step])
        assert isinstance(sent, TrainBatch) and isinstance(fetched, TrainBatch)
        wrong += wrong_fields(sent, step, rank // 2) + wrong_fields(fetched, step, rank // 2)
    refused = ""
    assert feed._client is not None
    try:
        feed._client.fetch(0, [0], 30)
    except FetchFailed as error:
        refused = str(error)
    if sharing is None:
        signal = feed.receive()
    else:
        feed.send_signal(signal := Signal.STOP)
    total = feed.all_reduce_sum(torch.tensor([1.0 + rank]))
    result = {"wrong": wrong, "refused": refused, "signal": signal.name, "total": total.item()}
    result |= {"metrics": combined_metrics(feed, rank)}
    dist.barrier()
    feed.close()
    if sharing is not None:
        sharing.close()
    return result
