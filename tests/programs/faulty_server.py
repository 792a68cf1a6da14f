# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server and source ranks in place of real ones, for connections and lanes without processes.

At one request, a `FaultyServer` fails in one of several ways. Afterwards it must come to serve what it
says, whatever the lane has to do for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import Capabilities
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.weight_sync.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.weight_sync.lane import Lane, LaneState, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.group_transport import GroupConnection
from torchtitan.grpo.weight_sync.versions import Versions
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

TRAINER = GroupFacts("cuda", "2.13.0", "2.29.7", "GPU-a", dict.fromkeys(NCCL_SETTINGS, ""))
SPEC = BucketSpec(("a",), ("float32",), ((3,),))


class RefusedError(Exception): ...


class Server:
    """Takes everything but what it refuses, and notes the order of all that it is asked for."""

    url = "http://a"

    def __init__(
        self,
        stops_for: Any = "nothing",
        *,
        receives_in_parallel: bool = False,
        facts: tuple[GroupFacts, ...] = (),
        refused: str = "",
    ) -> None:
        self.capabilities = Capabilities(
            stops_for, receives_in_parallel=receives_in_parallel, receives_pieces=True
        )
        self.facts, self.refused = list(facts), refused
        self.order: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> float:
            self.order.append((name, *arguments))
            return 0.25

        return call

    async def group_facts(self) -> list[GroupFacts]:
        return self.facts

    async def num_workers(self) -> int:
        return 2

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        if self.refused == "join":
            raise RefusedError
        self.order.append(("join", info.group_name, info.backend))

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        if self.refused == "push":
            raise RefusedError
        self.order.append(("receive", group_name, last, version))


class Source:
    """A source rank's sender, which notes what it sends; from ``stops_at`` on it waits, or fails."""

    def __init__(self, rank: int, stops_at: int = 99, error: Exception | None = None) -> None:
        self.rank, self.sent = rank, list[Any]()
        self.stops_at, self.error, self.may_send = stops_at, error, asyncio.Event()

    async def group_facts(self) -> GroupFacts:
        return replace(TRAINER, gpu=f"GPU-of-{self.rank}")

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        if index >= self.stops_at:
            if self.error is not None:
                raise self.error
            await self.may_send.wait()
        return SPEC

    async def open(
        self, server_url: str, world_size: int, backend: str, in_pieces: bool
    ) -> WeightGroupInfo:
        assert world_size == 3  # this rank, and the server's two workers
        return WeightGroupInfo("127.0.0.1", 1, 1, 3, f"group{self.rank}", backend, 1.0)

    async def join(self, server_url: str) -> None: ...

    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        self.sent.append((version, index, base))

    async def leave(self, server_url: str) -> None: ...


def connect(
    server: Any, *sources: Any, num_buckets: int = 2, transport: Any = "host"
) -> GroupConnection:
    counts = {source.rank: num_buckets + i for i, source in enumerate(sources)}
    return GroupConnection(server, sources, counts, 20.0, transport)


NOTHING, MIXTURE, MAX_REQUESTS = -1, -2, 300


class FaultyServer(Server):
    """Serves what it is sent; at one request it refuses, or its answer is lost, or the request
    arrives late, or it was restarted before."""

    def __init__(self, stops_for: str, fault: str = "", at: int = 0, lag: int = 0) -> None:
        super().__init__(stops_for)
        self._fault, self._at, self._lag = fault, at, lag
        self.num_requests, self.late = 0, list[tuple[int, str, int]]()
        self.believed = NOTHING  # what the dispatcher was told last
        self._restart()

    def _restart(self) -> None:
        self.held, self.label, self.update = NOTHING, NOTHING, None
        self.is_paused = self.is_joined = False

    def serves(self, version: int) -> bool:
        is_settled = not self.is_paused and not self.late and self.num_requests > self._at
        return is_settled and self.held == self.label == self.believed == version

    def believe(self, _: str, version: int) -> None:
        self.believed = version

    def lose(self, url: str) -> None:
        self.believe(url, NOTHING)

    def note_asleep(self, _: str) -> None:
        raise AssertionError("nobody has asked for it")

    def __getattr__(self, name: str) -> Any:
        return lambda version=NOTHING: self._ask(name, version)

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        await self._ask("join", NOTHING)

    async def receive_bucket(self, bucket: BucketSpec, *, version: int, **_: Any) -> None:
        await self._ask("bucket", version)

    async def _ask(self, request: str, version: int) -> Any:
        await asyncio.sleep(0)
        self.num_requests += 1
        for late in [late for late in self.late if late[0] <= self.num_requests]:
            self.late.remove(late)
            self._handle_late(*late[1:])
        fault = self._fault if self.num_requests == self._at else ""
        if fault == "restarted":
            self._restart()
        if fault == "late":
            self.late.append((self.num_requests + self._lag, request, version))
        if fault not in ("late", "refused"):
            self._handle(request, version)
        if fault in ("late", "refused", "answered in vain"):
            raise RouteError(f"{request}: no answer")
        return self.label

    def _handle_late(self, request: str, version: int) -> None:
        if request == "bucket":  # nobody sends to it any more; a part may have come
            if self.capabilities.stops_for == "transfer" and self.update is not None:
                self.held = MIXTURE
        elif request != "join":  # there is nobody to join
            with contextlib.suppress(RouteError):
                self._handle(request, version)

    def _handle(self, request: str, version: int) -> None:
        if request == "join":
            self.is_joined = True
        elif request == "leave_weight_groups":
            self.is_joined, self.update = False, None
        elif request in ("pause", "resume"):
            self.is_paused = request == "pause"
        elif request == "begin_update":
            self.update = (0, NOTHING)
            if self.capabilities.stops_for == "transfer":
                self.label = NOTHING
        elif request == "bucket":
            if not self.is_joined or self.update is None:
                raise RouteError("No weight update is open.")
            self.update = (self.update[0] + 1, version)
            if self.capabilities.stops_for == "transfer":
                self.held = MIXTURE  # received straight into the weights that it serves
        elif request == "commit_update":
            if self.update != (2, version):
                raise RouteError("The update is not whole.")
            self.held, self.label, self.update = version, version, None
        if self.label != NOTHING:
            is_true = self.is_paused or self.held == self.label
            assert is_true, "tokens are labeled with what did not write them"
            assert self.label >= self.believed, "work is sent for a version not served yet"


@contextlib.asynccontextmanager
async def running_lane(
    server: Any, *, is_lent: bool = False
) -> AsyncIterator[tuple[Lane, Versions]]:
    async def drop(version: int) -> None: ...

    versions = Versions(SlotTable(2), 4, drop)
    sync = WeightSync(retry_seconds=0.001, max_retry_seconds=0.001)
    attestation = Attestation(0, [], Probes(), Tolerances(1.0, 1.0), 1.0)
    listeners = Listeners(
        lambda: None,
        lambda url, version, _: server.believe(url, version),
        lambda url, _: server.lose(url),
        server.note_asleep,
    )
    connection = connect(server, Source(0))
    lane = Lane(connection, versions, sync, attestation, listeners, is_lent=is_lent)
    running = asyncio.create_task(lane.run())
    server.check_lane = lambda: running.done() and running.result()
    yield lane, versions
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await versions.close()


async def until_served(server: Any, lane: Lane, version: int) -> None:
    while lane.state is not LaneState.READY or not server.serves(version):
        assert server.num_requests < MAX_REQUESTS, "the server is stuck"
        assert server.believed == lane.version, "the dispatcher believes what the lane does not"
        server.check_lane()
        await asyncio.sleep(0)


async def bring_two_versions(server: Any) -> None:
    """Runs a lane until the server has served two versions, one after the other."""
    async with running_lane(server) as (lane, versions):
        for version in (1, 2):
            await versions.begin(version)
            await until_served(server, lane, version)
