# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a server is asked for in a join and a push, over which backend, and when any of it fails."""

import asyncio
import contextlib
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest

from torchtitan.grpo.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import Capabilities
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.weight_sync import lane as lane_module
from torchtitan.grpo.weight_sync.lane import Lane, LaneEvent, LaneState, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.group_transport import (
    GroupConnection,
    Handshake,
    NcclImpossible,
)
from torchtitan.grpo.weight_sync.versions import Versions
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

TRAINER = GroupFacts("cuda", "2.13.0", "2.29.7", "GPU-a", dict.fromkeys(NCCL_SETTINGS, ""))
EQUAL = replace(TRAINER, gpu="GPU-b")
OTHER = replace(EQUAL, nccl="2.30.7", torch="2.14.1")
UNKNOWN = GroupFacts(device="cuda", hint="It keeps silent.")
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


JOIN = [("leave_weight_groups",), ("resume",)]


async def test_one_run_sends_to_one_server_over_nccl_and_to_another_over_gloo():
    for facts, backend in ((EQUAL, "nccl"), (OTHER, "gloo")):
        server = Server(facts=(facts, replace(facts, gpu="GPU-c")))
        await connect(server, Source(0), Source(1), transport="auto").join()
        # All sources use the same one.
        assert server.order == [*JOIN, ("join", "group0", backend), ("join", "group1", backend)]


def chosen(handshake: Handshake) -> str:
    sources: Any = [Source(0), Source(1)]
    return asyncio.run(handshake.backend(sources))


def test_a_reason_against_nccl_is_given_once_for_as_long_as_it_holds(caplog):
    caplog.set_level(logging.WARNING)
    server: Any = Server(facts=(OTHER,))
    handshake = Handshake(server, "auto")
    assert [chosen(handshake) for _ in range(3)] == ["gloo"] * 3
    server.facts = [EQUAL]  # it was restarted with the trainer's torch
    assert chosen(handshake) == "nccl"
    server.facts = [UNKNOWN]
    assert chosen(handshake) == "gloo"
    differs, unknown = [record.getMessage() for record in caplog.records]
    assert "http://a receives weights from host memory over gloo, because NCCL cannot" in differs
    assert "NCCL 2.29.7" in differs and "NCCL 2.30.7" in differs
    assert "It keeps silent. Set weight_sync.transport = 'nccl' to use it" in unknown


def test_nccl_refuses_a_server_that_differs_and_tries_one_that_keeps_silent(caplog):
    caplog.set_level(logging.WARNING)
    server: Any = Server(facts=(OTHER,))
    with pytest.raises(NcclImpossible) as refused:
        chosen(Handshake(server, "nccl"))
    assert refused.value.was_answered  # so that the run ends instead of retrying without end
    server.facts = [UNKNOWN]
    assert chosen(Handshake(server, "nccl")) == "nccl"
    assert "it is not known whether NCCL can be used" in caplog.text


async def test_a_server_is_resumed_even_if_recovering_was_cancelled():
    class Hanging(Server):
        async def leave_weight_groups(self) -> None:
            self.order.append("leave")
            if self.order.count("leave") == 2:  # the first one is of the join
                await asyncio.Event().wait()

    server = Hanging()
    connection = connect(server)
    await connection.close()
    assert server.order == []  # it was never joined
    await connection.join()
    recovering = asyncio.create_task(connection.recover())
    await asyncio.sleep(0.01)
    recovering.cancel()
    await asyncio.gather(recovering, return_exceptions=True)
    joined = ["leave", ("resume",), "leave"]
    assert server.order == joined
    for _ in range(2):
        await connection.close()
        assert server.order == [*joined, "leave", ("resume",)]


# Of each source in turn.
BUCKETS = [("receive", f"group{rank}", False, 7) for rank in (0, 2, 0, 2)]
BUCKETS.append(("receive", "group2", True, 7))
BEGIN, COMMIT, PAUSE, RESUME = ("begin_update",), ("commit_update", 7), ("pause",), ("resume",)


@pytest.mark.parametrize(
    ("stops_for", "order"),
    [
        ("transfer", [PAUSE, BEGIN, *BUCKETS, COMMIT, RESUME]),
        ("commit", [BEGIN, *BUCKETS, PAUSE, COMMIT, RESUME]),
        ("nothing", [BEGIN, *BUCKETS, COMMIT]),
    ],
)
async def test_a_server_stands_still_for_as_long_as_it_must_and_is_sent_all_buckets(
    stops_for, order
):
    server, sources = Server(stops_for), [Source(0), Source(2)]
    connection = connect(server, *sources)
    with pytest.raises(RuntimeError, match="must be joined before a push"):
        await connection.push(7, None)
    await connection.join()
    server.order.clear()
    report = await connection.push(7, 6)
    assert server.order == order
    assert [source.sent for source in sources] == [[(7, i, 6) for i in range(n)] for n in (2, 3)]
    assert (report.version, report.num_bytes) == (7, 60)
    if stops_for == "nothing":
        assert report.pause_seconds == 0.25  # by the server's own clock


@pytest.mark.parametrize("receives_in_parallel", [True, False])
async def test_sources_send_at_the_same_time_to_a_server_that_receives_so(receives_in_parallel):
    server = Server(receives_in_parallel=receives_in_parallel)
    waiting, ready = Source(0, stops_at=1), Source(1)
    connection = connect(server, waiting, ready)
    await connection.join()
    pushing = asyncio.create_task(connection.push(7, None))
    await asyncio.sleep(0.05)
    assert len(waiting.sent) == 1
    assert len(ready.sent) == (3 if receives_in_parallel else 1)
    assert COMMIT not in server.order
    waiting.may_send.set()
    await pushing
    assert (len(waiting.sent), len(ready.sent)) == (2, 3)


async def test_a_source_that_fails_ends_the_push_of_all():
    server = Server(receives_in_parallel=True)
    failing = Source(1, stops_at=1, error=RuntimeError("rank 1 is gone"))
    connection = connect(server, Source(0, stops_at=1), failing)
    await connection.join()
    tasks = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        await connection.push(7, None)
    assert COMMIT not in server.order
    assert asyncio.all_tasks() == tasks, "nothing goes on"


@pytest.mark.parametrize("refused", ["join", "push"])
def test_an_error_is_part_of_no_cycle(refused):
    """Its traceback refers to connections and buckets, which a cycle would keep for a long time."""

    async def body() -> weakref.ref[RefusedError]:
        connection = connect(Server(refused=refused), Source(0), num_buckets=3)
        kept = None
        try:
            await connection.join()
            await connection.push(7, None)
        except RefusedError as error:
            kept = weakref.ref(error)
        assert kept is not None
        await connection.close()
        return kept

    gc.disable()
    try:
        assert asyncio.run(body())() is None
    finally:
        gc.enable()


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


async def bring_two_versions(server: Any) -> None:
    """Runs a lane until the server has served two versions, one after the other."""

    async def drop(version: int) -> None: ...

    versions = Versions(SlotTable(2), 4, drop)
    sync = WeightSync(retry_seconds=0.001, max_retry_seconds=0.001)
    attestation = Attestation(0, [], Probes(), Tolerances(1.0, 1.0), 1.0)
    listeners = Listeners(
        lambda: None, server.believe, lambda url, _: server.believe(url, NOTHING), print
    )
    lane = Lane(connect(server, Source(0)), versions, sync, attestation, listeners)
    running = asyncio.create_task(lane.run())
    for version in (1, 2):
        await versions.begin(version)
        while lane.state is not LaneState.READY or not server.serves(version):
            assert server.num_requests < MAX_REQUESTS, "the server is stuck"
            assert server.believed == lane.version, "the dispatcher believes what the lane does not"
            if running.done():
                running.result()
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await versions.close()


FAULTS = [("refused", 0), ("answered in vain", 0), ("restarted", 0)]
FAULTS += [("late", lag) for lag in (1, 2, 3, 5, 8, 13)]


async def bring_through_all_faults(stops_for: str) -> None:
    server = FaultyServer(stops_for)
    await bring_two_versions(server)
    for at in range(1, server.num_requests + 3):
        for fault, lag in FAULTS:
            try:
                await bring_two_versions(FaultyServer(stops_for, fault, at, lag))
            except AssertionError as error:
                raise AssertionError(f"{error}: request {at} was {fault} ({lag})") from error


@pytest.mark.parametrize("stops_for", ["transfer", "commit", "nothing"])
async def test_whatever_request_fails_the_server_comes_to_serve_what_it_says(
    stops_for, monkeypatch
):
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.001)
    await bring_through_all_faults(stops_for)


async def without_looking_at_the_version(lane: Lane, version: int) -> None: ...


async def without_lifting_a_late_pause(lane: Lane) -> None:
    await lane._check_version(lane.version)


async def confirming_before_the_commit(lane: Lane, version: int) -> Any:
    lane._listeners.on_version(lane.url, version)
    return await lane._connection.push(version, None)


def without_telling_the_loss(lane: Lane, *_: object) -> None:
    lane._server.lose()
    lane._take(LaneEvent.FAILED)


@pytest.mark.parametrize(
    ("method", "planted", "message"),
    [
        ("_check_version", without_looking_at_the_version, "the server is stuck"),
        ("_check_idle", without_lifting_a_late_pause, "the server is stuck"),
        ("_push", confirming_before_the_commit, "work is sent for a version not served|believes"),
        ("_lose", without_telling_the_loss, "the dispatcher believes what the lane does not"),
    ],
)
async def test_a_lane_that_is_broken_on_purpose_is_found(method, planted, message, monkeypatch):
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(Lane, method, planted)
    with pytest.raises(AssertionError, match=message):
        await bring_through_all_faults("commit")
