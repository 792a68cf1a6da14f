# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A training loop that pushes to servers within this process, all of it under the recorder.

Publisher, leader, lanes, snapshots, gathering, the group transport over "NCCL", and the receiving
side of a vLLM worker are the real ones. What is replaced is CUDA and NCCL (see `recorder.py`), the
optimizer step, and HTTP: the servers' clients call :class:`WorkerUpdates` directly.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from recorded import Channel, Group
from recorder import Recorder

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import Capabilities, InferenceClient, ServerError
from torchtitan.grpo.inference.vllm.updates import UpdateRequest, WorkerUpdates
from torchtitan.grpo.models.shards import Assembly, Block, Piece
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.weight_sync.gather import Agent, Gatherer
from torchtitan.grpo.weight_sync.lane import Listeners
from torchtitan.grpo.weight_sync.leader import Leader, LeaderParts
from torchtitan.grpo.weight_sync.memory_plan import NUM_SLOTS
from torchtitan.grpo.weight_sync.payloads import PayloadPool
from torchtitan.grpo.weight_sync.plan import SourceLimits
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slot_layout import PushPlan, SnapshotSlots, plan_push
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots
from torchtitan.grpo.weight_sync.transports import group_end, group_transport
from torchtitan.grpo.weight_sync.transports.group_end import GroupSettings
from torchtitan.grpo.weight_sync.transports.group_transport import GroupTransport
from torchtitan.grpo.weight_wire import receiving
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

CUDA = torch.device("cuda", 0)
WIRE = torch.bfloat16
SHAPES = {"norm": (7,), "rows": (6, 5), "turned": (4, 3), "last": (9,)}
# What both ends are said to be, so that `auto` takes NCCL; they differ in their GPUs.
FACTS = GroupFacts("cuda", "2.13.0", "2.29.7", "GPU-0", dict.fromkeys(NCCL_SETTINGS, ""))
PIECE_BYTES = 24  # most buckets have several
# Longer than anything takes here; the tests that wait for a deadline set their own.
PATIENCE_SECONDS = 20.0


class Adapter:
    """Renames parameters, and turns one around, which must therefore be converted."""

    def to_hf(self, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, tensor),) = native.items()
        return {f"hf.{name}": tensor.T if name == "turned" else tensor}


class ServedModel:
    """A worker's model on the server's GPU, which generates while it is updated."""

    def __init__(self) -> None:
        shapes = {f"hf.{n}": s[::-1] if n == "turned" else s for n, s in SHAPES.items()}
        self.parameters = {n: torch.zeros(s, dtype=WIRE, device=CUDA) for n, s in shapes.items()}

    def generate(self) -> None:
        """Queues a decoding step, which reads all weights."""
        for parameter in self.parameters.values():
            parameter + 1

    def tensors(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    def checkpoint_folder(self) -> str:
        return "/nowhere"

    def begin_load(self) -> None: ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.parameters[name].copy_(tensor)

    def finish_load(self) -> None: ...

    def restore(self) -> None: ...


class Server(InferenceClient):
    def __init__(self, url: str, recorder: Recorder, in_pieces: bool, on_host: bool) -> None:
        self.url, self._recorder = url, recorder
        self.capabilities = Capabilities(
            stops_for="commit", takes_deltas=True, receives_pieces=in_pieces
        )
        self.served: int | None = None
        # vLLM's worker, which has chosen its GPU
        self._executor = ThreadPoolExecutor(1, initializer=lambda: torch.cuda.set_device(CUDA))
        self._sequence = 0
        with recorder.process(url):
            self.model = ServedModel()
            self.updates = WorkerUpdates(self.model, CUDA)
            self.updates.stage_on_host(on_host)

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        with self._recorder.process(self.url):  # a thread that is started here belongs to it
            future = loop.run_in_executor(self._executor, call, *args)
        try:
            return await future
        except (RuntimeError, ValueError) as error:
            raise ServerError(f"{self.url}: {error}") from error

    def _update(self, action: Any, **what: Any) -> None:
        self.model.generate()
        self.updates.update(UpdateRequest(action, **what))

    async def num_workers(self) -> int:
        return 1

    async def group_facts(self) -> list[GroupFacts]:
        return [replace(FACTS, gpu="GPU-1")]

    async def version(self) -> int | None:
        return self.served

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        await self._call(self.updates.join, info, 0)

    async def leave_weight_groups(self) -> None:
        await self._call(self.updates.leave)

    def leave(self) -> None:
        """Makes the worker leave its groups, as its operator could."""
        with self._recorder.process(self.url):
            self._executor.submit(self.updates.leave).result(PATIENCE_SECONDS)

    async def begin_update(self) -> None:
        self._sequence = 0
        await self._call(self.updates.begin)

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(bucket).items()}
        number, self._sequence = self._sequence, self._sequence + 1
        await self._call(
            partial(self._update, "stage", group_name=group_name, sequence=number, **fields)
        )

    async def commit_update(self, version: int) -> float:
        await self._call(partial(self._update, "verify", version=str(version)))
        await self._call(self.updates.finish)
        self.served = version
        return 0.0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> None: ...

    async def close(self) -> None:
        self._executor.shutdown(wait=False)

    async def _never(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pushes do not need it")

    describe = generate = abort = load = update_from_disk = rate = _never
    sleep = wake = _never


class PushRig:
    """A trainer of one rank, and servers. Its methods belong to the training thread."""

    def __init__(
        self,
        recorder: Recorder,
        num_servers: int = 1,
        *,
        contiguous: bool = True,
        sync: WeightSync | None = None,
        in_pieces: bool = True,
        on_host: bool = False,
    ) -> None:
        self.recorder = recorder
        self.sync = sync or WeightSync(attest_every=0, timeout_seconds=PATIENCE_SECONDS)
        self.channels: dict[str, Channel] = {}
        self.is_silent = False  # whether servers that join from now on take nothing
        self._patches = ExitStack()
        for module in (group_end, receiving):
            self._patches.enter_context(
                mock.patch.object(module, "create_weight_group", self._create_group)
            )
            self._patches.enter_context(
                mock.patch.object(
                    module, "destroy_weight_group", lambda group: group.channel.abort()
                )
            )
        self._patches.enter_context(
            mock.patch.object(group_transport, "own_group_facts", lambda device: FACTS)
        )
        self.parameters = {n: torch.zeros(s, device=CUDA) for n, s in SHAPES.items()}
        self.servers = {
            url: Server(url, recorder, in_pieces, on_host)
            for url in (f"http://127.0.0.{i + 1}:9" for i in range(num_servers))
        }
        self.publisher = self._publisher(_plan(self.sync, contiguous))
        self.version = -1

    def _create_group(self, info: WeightGroupInfo, rank: int, *_: Any):
        torch.cuda.Stream()  # as the communicator takes one, which synchronous calls do not use
        # Both sides get the channel that the name stands for, whoever comes first.
        return Group(self.channels.setdefault(info.group_name, Channel(self.is_silent)), rank)

    def _publisher(self, plan: PushPlan) -> WeightPublisher:
        sync = self.sync
        max_held = len(self.servers) + 2
        memory = SnapshotSlots(plan, NUM_SLOTS + max_held, pinned=True)
        snapshots = Snapshots(self.parameters, memory.shards, CUDA)
        slots = SlotTable(NUM_SLOTS, max_held)
        (source,) = plan.sources
        gatherer = Gatherer(plan, memory, _ADAPTER, PATIENCE_SECONDS)
        sizes = [bucket.num_bytes for bucket in source.buckets]
        pool = PayloadPool([b.spec for b in source.buckets], sizes, False, memory.buckets)
        settings = GroupSettings(
            "127.0.0.1", "auto", sync.timeout_seconds, CUDA, max(sizes), piece_bytes=PIECE_BYTES,
            deltas=sync.delta,
        )  # fmt: skip
        transport = GroupTransport(plan, settings)

        def read(slot: int, version: int) -> Any:
            slots.wait_filled(slot, version, PATIENCE_SECONDS)
            return snapshots.read(slot, PATIENCE_SECONDS)

        agent, sender = Agent(0, gatherer, read, pool), transport.make_sender(0, pool)

        def make_leader(on_change: Callable[[], None]) -> Leader:
            parts = LeaderParts(
                [agent], [agent], [sender], [sender, agent], transport,
                lambda s: self.servers[s.url],
            )  # fmt: skip
            listeners = Listeners(on_change, lambda *_: None, lambda *_: None, print)
            attestation = Attestation(0, [], Probes(), Tolerances(1.0, 1.0), 1.0)
            infos = [ServerInfo(url, "vllm") for url in self.servers]
            return Leader(slots, parts, sync, attestation, listeners, infos, lambda: None)

        return WeightPublisher(
            snapshots=snapshots, slots=slots, probes=Probes(), attest_every=0,
            make_leader=make_leader, follow=asyncio.Event().wait,
        )  # fmt: skip

    def step(self) -> None:
        """One optimizer step, its publish, and the next forward pass."""
        self.publisher.fence()
        self.version += 1
        for parameter in self.parameters.values():
            parameter.add_(1.0)
        self.publisher.publish(self.version, self.publisher.reserve_slot())
        for parameter in self.parameters.values():
            parameter * 2.0

    def wait_served(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        self.publisher.wait_for(self.version, PATIENCE_SECONDS, lambda: time.monotonic() > deadline)
        late = [lane for lane in self.publisher.lanes if lane.version < self.version]
        assert not late, [(lane.url, lane.state, lane.last_error) for lane in late]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            self.publisher.raise_if_failed()
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.001)

    def served_values(self, server: Server) -> set[float]:
        """Returns the values of all weights that a server holds; one step adds 1 to each."""
        # Read without torch: the recorder would take it for a race.
        bits = [t.view(torch.int16).numpy().ravel() for t in server.model.parameters.values()]
        values = np.concatenate(bits).astype(np.uint16).astype(np.uint32) << 16
        return set(values.view(np.float32).tolist())

    def close(self) -> None:
        self.publisher.close(timeout_seconds=PATIENCE_SECONDS)
        self._patches.close()


_ADAPTER: Any = Adapter()


def _plan(sync: WeightSync, contiguous: bool) -> PushPlan:
    assemblies = [
        Assembly(name, shape, (Piece(0, Block((0,) * len(shape), shape)),))
        for name, shape in SHAPES.items()
    ]
    return plan_push(assemblies, _ADAPTER, WIRE, 40, SourceLimits(), contiguous=contiguous)


def single_rank(folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
