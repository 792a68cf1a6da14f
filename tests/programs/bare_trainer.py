# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Plays the trainer with bare process groups that push models to a real server.

Two source ranks, each with half of the weights and a group of its own with the server, as
under two pipeline stages.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tagged
import torch
import torch.distributed as dist
from tagged import VOCAB_SIZE as VOCAB_SIZE
from transformers import Qwen3ForCausalLM

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.types import ServerKind
from torchtitan.grpo.weight_wire import sparse
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

TIMEOUT = 60.0
PROBE = [7, 8, 9, 50, 60, 70, 80, 90, *range(100, 140), 7, 8, 9]
KEYS = {"api_key": "generation-key", "admin_key": "control-key"}
new_versions = itertools.count(1)  # test modules may share a server
_names = (f"contract-{i}" for i in itertools.count())


def make_model(seed: int) -> Qwen3ForCausalLM:
    return tagged.make_model(
        seed, hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


@torch.no_grad()
def expected_logprobs(model: Qwen3ForCausalLM) -> np.ndarray:
    ids = torch.tensor([PROBE])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


@dataclass
class Bucket:
    spec: BucketSpec
    payload: torch.Tensor


def make_bucket(tensors: dict[str, torch.Tensor], **more: Any) -> Bucket:
    spec = BucketSpec(
        names=tuple(tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        checksums=tuple(tensor_checksum(t) for t in tensors.values()),
        **more,
    )
    parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
    return Bucket(spec, torch.cat(parts))


def make_buckets(model: Qwen3ForCausalLM, num_buckets: int) -> list[Bucket]:
    items = list(model.state_dict().items())
    size = -(-len(items) // num_buckets)
    return [make_bucket(dict(items[i : i + size])) for i in range(0, len(items), size)]


def make_deltas(old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, base: int) -> list[Bucket]:
    deltas = []
    for before, after in zip(make_buckets(old, 4), make_buckets(new, 4), strict=True):
        numels = [int(np.prod(shape)) for shape in after.spec.shapes]
        payload, num_changed = sparse.encode(before.payload, after.payload, numels, 4)
        spec = replace(after.spec, num_changed=num_changed, base_version=base)
        deltas.append(Bucket(spec, payload))
    return deltas


@dataclass
class RunningServer:
    kind: ServerKind
    launched: LaunchedServer

    def client(self) -> InferenceClient:
        return make_client(self.kind, self.launched.url, request_timeout_seconds=300, **KEYS)


class Trainer:
    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self.groups: dict[str, dist.ProcessGroup] = {}

    async def join(self) -> None:
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            name = next(_names)
            info = WeightGroupInfo(
                "127.0.0.1", store.port, 1, 2, name, "gloo", TIMEOUT, deltas=True
            )
            ours = asyncio.create_task(asyncio.to_thread(create_weight_group, info, 0, store))
            await self.client.join_weight_group(info)
            self.groups[name] = await ours

    async def give_up(self) -> None:
        await self.client.leave_weight_groups()
        await self.client.resume()
        self.destroy()

    def destroy(self) -> None:
        for group in self.groups.values():
            destroy_weight_group(group)
        self.groups = {}

    async def broadcast(self, name: str, bucket: Bucket) -> None:
        await asyncio.to_thread(dist.broadcast, bucket.payload, 0, group=self.groups[name])

    def announce(
        self, name: str, bucket: Bucket, version: int, last: bool = False
    ) -> "asyncio.Task[None]":
        return asyncio.create_task(
            self.client.receive_bucket(bucket.spec, group_name=name, last=last, version=version)
        )

    async def send(self, buckets: list[Bucket], version: int) -> None:
        names = list(self.groups)
        announced = [
            self.announce(names[i % 2], bucket, version, last=i == len(buckets) - 1)
            for i, bucket in enumerate(buckets)
        ]

        async def broadcast_all() -> None:
            for i, bucket in enumerate(buckets):
                await self.broadcast(names[i % 2], bucket)

        ours = asyncio.create_task(broadcast_all())
        done, _ = await asyncio.wait({ours, *announced}, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for task in announced if task in done and (error := task.exception())]
        if failures:
            await self.client.leave_weight_groups()  # a broadcast that it waits for ends
            await asyncio.wait({ours, *announced})
            ours.exception()
            raise failures[0]
        await asyncio.gather(ours, *announced)

    async def push(self, buckets: list[Bucket], version: int) -> float:
        client, started = self.client, time.monotonic()
        if client.capabilities.stops_for == "transfer":
            await client.pause()
        await client.begin_update()
        await self.send(buckets, version)
        if client.capabilities.stops_for == "commit":
            started = time.monotonic()
            await client.pause()
        stood_still = await client.commit_update(version)
        if client.capabilities.stops_for != "nothing":
            await client.resume()
            stood_still = time.monotonic() - started
        assert await client.version() == version
        return stood_still


@asynccontextmanager
async def joined(server: RunningServer) -> AsyncIterator[tuple[InferenceClient, Trainer]]:
    client = server.client()
    trainer = Trainer(client)
    try:
        await trainer.join()
        yield client, trainer
    finally:
        await trainer.give_up()
        await client.close()


async def assert_serves(client: InferenceClient, model: Qwen3ForCausalLM, version: int) -> None:
    served = await client.prompt_logprobs(PROBE)
    np.testing.assert_allclose(served, expected_logprobs(model), atol=1e-4, rtol=0)
    # Once more: a prefix that is in the cache by now must not hide its logprobs.
    np.testing.assert_allclose(await client.prompt_logprobs(PROBE), served, atol=1e-5, rtol=0)
    assert await client.version() == version


def with_trainer(
    test: Callable[..., Awaitable[None]],
) -> Callable[[RunningServer], Awaitable[None]]:
    async def whole(server: RunningServer) -> None:
        async with joined(server) as (client, trainer):
            await test(server, client, trainer)

    return whole


@torch.no_grad()
def tempered_logprobs(
    model: Qwen3ForCausalLM,
    prompt: list[int],
    completion: np.ndarray,
    temperature: float,
) -> np.ndarray:
    ids = torch.tensor([prompt + completion.tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
