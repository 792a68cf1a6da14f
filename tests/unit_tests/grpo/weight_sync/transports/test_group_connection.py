# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a server is asked for when it joins and in a push, over which backend, and when it is left."""

import asyncio
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest

from torchtitan.grpo.weight_sync.transports.group_transport import (
    GroupConnection,
    Handshake,
    NcclImpossible,
)
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
    receives_pieces = True

    def __init__(
        self,
        stops_for: str = "nothing",
        *,
        receives_in_parallel: bool = False,
        facts: tuple[GroupFacts, ...] = (),
        refused: str = "",
    ) -> None:
        self.stops_for, self.receives_in_parallel = stops_for, receives_in_parallel
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
