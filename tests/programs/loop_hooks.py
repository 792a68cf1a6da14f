"""Random delays and checks within pushes, in the loop's process alone.

Its clients and its agent's methods are wrapped.
"""

import asyncio
import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tagged import TaggedModel

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.weight_sync import build
from torchtitan.grpo.weight_sync.gather import Agent
from torchtitan.grpo.weight_sync.payloads import Bucket, Payload
from torchtitan.grpo.weight_sync.transports.group_transport import GroupSender
from torchtitan.grpo.weight_wire.buckets import tensor_bytes
from torchtitan.grpo.weight_wire.checksum import tensor_checksum

_METHODS = (
    "num_workers", "pause", "resume", "join_weight_group", "leave_weight_groups",
    "begin_update", "receive_bucket", "commit_update", "version", "rate",
)  # fmt: skip
_OVERTAKEN_SECONDS = 0.06


class Hooks:
    def __init__(self, tell: Callable[..., None], settings: Any) -> None:
        self.tell, self.settings = tell, settings
        self._random = random.Random(settings.seed + 100)

    def random_delay(self) -> float:
        """Returns a random delay in seconds: mostly short, seldom long."""
        return self.settings.delays * self._random.random() ** 3

    def sleep(self) -> None:
        time.sleep(self.random_delay())


class DelayedClient:
    def __init__(self, inner: InferenceClient, hooks: Hooks) -> None:
        self._inner, self._hooks = inner, hooks

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in _METHODS:
            return attribute

        async def call(*arguments: Any, **options: Any) -> Any:
            # Not before this one: the order of the calls is that of the broadcasts.
            if name != "receive_bucket":
                await asyncio.sleep(self._hooks.random_delay())
            result = await attribute(*arguments, **options)
            await asyncio.sleep(self._hooks.random_delay())
            return result

        return call


def install(
    hooks: Hooks, model: TaggedModel, expected_shard: Callable[[str, int], torch.Tensor]
) -> None:
    client_for = build.client_for
    build.client_for = lambda inference, server: DelayedClient(client_for(inference, server), hooks)  # pyright: ignore
    gather = Agent._gather

    def checked_gather(self: Agent, slot: int, version: int, payload: Payload | None) -> None:
        hooks.sleep()
        gather(self, slot, version, payload)
        hooks.sleep()
        # Nobody may have written the slot: the leader has not released it yet.
        for name, shard in self._read_snapshot(slot, version).items():
            if not torch.equal(shard, expected_shard(name, version)):
                hooks.tell("violation", what=f"slot {slot} must hold {version}, {name} does not")

    @functools.wraps(GroupSender.send)  # with its mark as an operation
    async def checked_send(
        self: GroupSender, server_url: str, version: int, index: int, base: int | None
    ) -> None:
        def read(broadcast: Callable[[torch.Tensor], None]) -> None:
            with self.pool.reading(version) as payload:
                bucket = payload.bucket(index)
                check(bucket, version)
                hooks.sleep()
                broadcast(bucket.payload)
                check(bucket, version)

        await self._end(server_url).send(read)

    def check(bucket: Bucket, version: int) -> None:
        expected = model.checksums(version)
        parts = bucket.payload.split(tensor_bytes(bucket.spec.dtypes, bucket.spec.shapes))
        for name, part in zip(bucket.spec.names, parts, strict=True):
            if tensor_checksum(part) != expected[name]:
                hooks.tell("violation", what=f"a bucket must be of {version}, {name} is not")

    Agent._gather = checked_gather
    GroupSender.send = checked_send
    slow_down_copies(hooks)


def slow_down_copies(hooks: Hooks) -> None:
    """Splits copies into slots into two parts with a pause between them.

    Where the fence is left out, so much time that the next overwriting falls into it.
    """
    copy_all = torch._foreach_copy_
    least = _OVERTAKEN_SECONDS if hooks.settings.inject == "fence" else 0.0

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert threading.current_thread().name == "snapshot-copy"
        half = len(targets) // 2
        copy_all(targets[:half], sources[:half])
        time.sleep(least)
        hooks.sleep()
        copy_all(targets[half:], sources[half:])

    torch._foreach_copy_ = copy  # pyright: ignore
