# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Points at which a test can stop or harm a push, and checks within the push.

Only the loop's process is changed: its clients and its agent's methods are wrapped.
"""

import asyncio
import contextlib
import functools
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from tagged import TaggedModel

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.weight_sync import build
from torchtitan.grpo.weight_sync.gather import Agent
from torchtitan.grpo.weight_sync.payloads import Bucket, Payload
from torchtitan.grpo.weight_sync.transports.group_transport import GroupSender
from torchtitan.grpo.weight_wire.buckets import tensor_bytes
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

_METHODS = (
    "num_workers", "pause", "resume", "join_weight_group", "leave_weight_groups",
    "begin_update", "receive_bucket", "commit_update", "update_from_disk", "version",
    "rate",
)  # fmt: skip
_POLL_SECONDS = 0.01
_LONGEST_STOP_SECONDS = 60.0
_OVERTAKEN_SECONDS = 0.06


@dataclass
class Stop:
    """A point of a push to one server: before or after the n-th call of a method in it."""

    url: str
    method: str
    when: str
    index: int


class Hooks:
    """The armed hooks. Commands run on the training thread, everything else on other threads."""

    def __init__(self, tell: Callable[..., None], settings: Any) -> None:
        self.tell, self.settings = tell, settings
        self.is_going = True
        self.stop_at: Stop | None = None
        self.released = threading.Event()
        self.wrong_shape_for: str | None = None
        self.corrupt_for: str | None = None
        self._random = random.Random(settings.seed + 100)

    def end(self) -> None:
        self.is_going = False

    def stop(self, url: str, method: str, when: str, index: int) -> None:
        """Makes the next push that reaches this point stop until it is released."""
        self.released.clear()
        self.stop_at = Stop(url, method, when, index)

    def release(self) -> None:
        self.released.set()

    def wrong_shape(self, url: str) -> None:
        self.wrong_shape_for = url

    def corrupt(self, url: str) -> None:
        """Makes the bytes of a bucket of the next push differ from its checksums."""
        self.corrupt_for = url

    def half_close(self, ports: list[int]) -> None:
        closed = 0
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port in ports:
                # It may have ended in between.
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=os.dup(connection.fd)) as end,
                ):
                    end.shutdown(socket.SHUT_WR)
                    closed += 1
        self.tell("half_closed", count=closed)

    def random_delay(self) -> float:
        """Returns a random delay in seconds: mostly short, seldom long."""
        return self.settings.delays * self._random.random() ** 3

    def sleep(self) -> None:
        if self.settings.delays:
            time.sleep(self.random_delay())

    async def reach(self, url: str, method: str, when: str, index: int) -> None:
        if self.stop_at != Stop(url, method, when, index):
            return
        self.stop_at = None
        self.tell("stopped", url=url, method=method, when=when)
        deadline = time.monotonic() + _LONGEST_STOP_SECONDS
        while not self.released.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)


class HookedClient:
    def __init__(self, inner: InferenceClient, hooks: Hooks) -> None:
        self._inner, self._hooks = inner, hooks
        self._num_calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in _METHODS:
            return attribute

        async def call(*arguments: Any, **options: Any) -> Any:
            return await self._call(name, attribute, arguments, options)

        return call

    async def _call(self, name: str, method: Any, arguments: Any, options: Any) -> Any:
        hooks, url = self._hooks, self._inner.url
        if name == "begin_update":
            self._num_calls.clear()
        index = self._num_calls.get(name, 0)
        self._num_calls[name] = index + 1
        await hooks.reach(url, name, "before", index)
        # Not before this one: the order of the calls is that of the broadcasts.
        if hooks.settings.delays and name != "receive_bucket":
            await asyncio.sleep(hooks.random_delay())
        if name == "receive_bucket" and hooks.wrong_shape_for == url:
            changed = with_wrong_shape(arguments[0])
            if changed is not None:
                hooks.wrong_shape_for, arguments = None, (changed,)
                hooks.tell("wrong_shape", url=url)
        begin, error = time.monotonic(), None
        if name in ("join_weight_group", "update_from_disk"):
            hooks.tell("begun", url=url, method=name)
        try:
            result = await method(*arguments, **options)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            raise
        finally:
            if hooks.settings.tells_calls:
                seconds = time.monotonic() - begin
                hooks.tell("call", url=url, method=name, seconds=seconds, error=error)
        await hooks.reach(url, name, "after", index)
        if hooks.settings.delays:
            await asyncio.sleep(hooks.random_delay())
        return result


def with_wrong_shape(bucket: BucketSpec) -> BucketSpec | None:
    for index, shape in enumerate(bucket.shapes):
        if len(shape) == 2 and shape[0] != shape[1]:
            shapes = (*bucket.shapes[:index], shape[::-1], *bucket.shapes[index + 1 :])
            return replace(bucket, shapes=shapes)
    return None


def install(
    hooks: Hooks, model: TaggedModel, expected_shard: Callable[[str, int], torch.Tensor]
) -> None:
    client_for = build.client_for
    build.client_for = lambda inference, server: HookedClient(client_for(inference, server), hooks)  # pyright: ignore
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
        is_corrupt = hooks.corrupt_for == server_url and index == num_buckets(self, version) - 1
        if is_corrupt:
            hooks.corrupt_for = None
            hooks.tell("corrupted", url=server_url, version=version)

        def read(broadcast: Callable[[torch.Tensor], None]) -> None:
            with self.pool.reading(version) as payload:
                bucket = payload.bucket(index) if base is None else payload.deltas[base, index]
                is_whole = base is None
                check(bucket, version, is_whole)
                hooks.sleep()
                broadcast(corrupted(bucket.payload) if is_corrupt else bucket.payload)
                check(bucket, version, is_whole)

        await self._end(server_url).send(read)

    def check(bucket: Bucket, version: int, is_whole: bool) -> None:
        if not is_whole:
            return
        expected = model.checksums(version)
        parts = bucket.payload.split(tensor_bytes(bucket.spec.dtypes, bucket.spec.shapes))
        for name, part in zip(bucket.spec.names, parts, strict=True):
            if tensor_checksum(part) != expected[name]:
                hooks.tell("violation", what=f"a bucket must be of {version}, {name} is not")

    Agent._gather = checked_gather
    GroupSender.send = checked_send
    if hooks.settings.delays:
        slow_down_copies(hooks)


def num_buckets(sender: GroupSender, version: int) -> int:
    with sender.pool.reading(version) as payload:
        return len(payload.buffers)


def corrupted(payload: torch.Tensor) -> torch.Tensor:
    """Returns the bytes that a broken copy would leave: the second half is shifted."""
    half = payload.numel() // 8 * 4
    return torch.cat([payload[:half], payload[half:].roll(4 * 97)])


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
