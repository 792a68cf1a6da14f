# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a server is asked for in a push, and when it is left."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from torchtitan.grpo.weight_sync.transports.group_transport import GroupConnection
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo


class Server:
    """Notes what it is told, and never answers the first request to leave."""

    url = "http://a"
    receives_pieces = True

    def __init__(self) -> None:
        self.told: list[str] = []

    async def leave_weight_groups(self) -> None:
        self.told.append("leave")
        if self.told.count("leave") == 2:  # the first one is of the join
            await asyncio.Event().wait()

    async def resume(self) -> None:
        self.told.append("resume")

    async def num_workers(self) -> int:
        return 1


def test_a_server_is_resumed_even_if_recovering_was_cancelled():
    async def body() -> None:
        server: Any = Server()
        connection = GroupConnection(server, [], {}, 60.0, "host")
        await connection.close()
        assert server.told == []  # it was never joined
        await connection.join()
        recovering = asyncio.create_task(connection.recover())
        await asyncio.sleep(0.01)
        recovering.cancel()
        await asyncio.gather(recovering, return_exceptions=True)
        assert server.told == ["leave", "resume", "leave"]
        await connection.close()
        assert server.told == ["leave", "resume", "leave", "leave", "resume"]
        await connection.close()
        assert len(server.told) == 5

    asyncio.run(asyncio.wait_for(body(), 20))


SPEC = BucketSpec(("a",), ("float32",), ((3,),))


class Taking:
    """A server that takes every push, and the order of all that happens to it."""

    url = "http://a"
    receives_pieces = True

    def __init__(self, stops_for: str, *, receives_in_parallel: bool = False) -> None:
        self.stops_for, self.receives_in_parallel = stops_for, receives_in_parallel
        self.order: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> float:
            self.order.append((name, *arguments))
            return 0.25

        return call

    async def num_workers(self) -> int:
        return 2

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        self.order.append(("join_weight_group", info.group_name))

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        self.order.append(("receive", group_name, last, version))


class Source:
    """A source rank's sender, which notes what it sends."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent = rank, list[Any]()

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        return SPEC

    async def open(
        self, server_url: str, world_size: int, backend: str, in_pieces: bool
    ) -> WeightGroupInfo:
        assert world_size == 3  # this rank, and the server's two workers
        assert backend == "gloo"
        return WeightGroupInfo("127.0.0.1", 1, 1, 3, f"group{self.rank}", "gloo", 1.0)

    async def join(self, server_url: str) -> None: ...

    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        self.sent.append((version, index, base))

    async def leave(self, server_url: str) -> None: ...


# Of each source in turn.
BUCKETS = [("receive", "group0", False, 7), ("receive", "group2", False, 7)]
LAST = ("receive", "group0", True, 7)
BEGIN, COMMIT, PAUSE, RESUME = ("begin_update",), ("commit_update", 7), ("pause",), ("resume",)


@pytest.mark.parametrize(
    ("stops_for", "order"),
    [
        ("transfer", [PAUSE, BEGIN, *BUCKETS, LAST, COMMIT, RESUME]),
        ("commit", [BEGIN, *BUCKETS, LAST, PAUSE, COMMIT, RESUME]),
        ("nothing", [BEGIN, *BUCKETS, LAST, COMMIT]),
    ],
)
def test_a_server_stands_still_for_as_long_as_it_must_and_is_sent_all_buckets(stops_for, order):
    async def body() -> None:
        server: Any = Taking(stops_for)
        sources: Any = [Source(0), Source(2)]
        connection = GroupConnection(server, sources, {0: 2, 2: 1}, 20.0, "host")
        with pytest.raises(RuntimeError, match="must be joined before a push"):
            await connection.push(7, None)
        await connection.join()
        joined = [("join_weight_group", "group0"), ("join_weight_group", "group2")]
        assert server.order == [("leave_weight_groups",), RESUME, *joined]
        server.order.clear()
        report = await connection.push(7, 6)
        assert server.order == order
        assert [source.sent for source in sources] == [[(7, 0, 6), (7, 1, 6)], [(7, 0, 6)]]
        assert (report.version, report.num_bytes) == (7, 36)
        if stops_for == "nothing":
            assert report.pause_seconds == 0.25  # by the server's own clock
        await connection.close()

    asyncio.run(asyncio.wait_for(body(), 60))


class WaitingSource(Source):
    """A source rank that has nothing to send until the test says so."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.may_send = asyncio.Event()

    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        if index > 0:
            await self.may_send.wait()
        return await super().prepare(version, index, base)


@pytest.mark.parametrize("receives_in_parallel", [True, False])
def test_sources_send_at_the_same_time_to_a_server_that_receives_so(receives_in_parallel):
    async def body() -> None:
        server: Any = Taking("nothing", receives_in_parallel=receives_in_parallel)
        waiting, ready = WaitingSource(0), Source(1)
        sources: Any = [waiting, ready]
        connection = GroupConnection(server, sources, {0: 2, 1: 4}, 20.0, "host")
        await connection.join()
        pushing = asyncio.create_task(connection.push(7, None))
        await asyncio.sleep(0.05)
        assert len(waiting.sent) == 1
        assert len(ready.sent) == (4 if receives_in_parallel else 1)
        assert ("commit_update", 7) not in server.order
        waiting.may_send.set()
        await pushing
        assert (len(waiting.sent), len(ready.sent)) == (2, 4)
        await connection.close()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_source_that_fails_ends_the_push_of_all():
    class Broken(Source):
        async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
            if index == 1:
                raise RuntimeError("rank 1 is gone")
            return await super().prepare(version, index, base)

    async def body() -> None:
        server: Any = Taking("nothing", receives_in_parallel=True)
        waiting = WaitingSource(0)
        sources: Any = [waiting, Broken(1)]
        connection = GroupConnection(server, sources, {0: 2, 1: 2}, 20.0, "host")
        await connection.join()
        tasks = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            await connection.push(7, None)
        assert ("commit_update", 7) not in server.order
        assert asyncio.all_tasks() == tasks, "nothing goes on"
        await connection.close()

    asyncio.run(asyncio.wait_for(body(), 60))


class RefusedError(Exception): ...


class Refusing(Taking):
    """A server that refuses requests of one kind."""

    def __init__(self, refused: str) -> None:
        super().__init__("nothing")
        self.refused = refused

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        if self.refused == "join":
            raise RefusedError

    async def receive_bucket(self, bucket: BucketSpec, **options: Any) -> None:
        if self.refused == "push":
            raise RefusedError


@pytest.mark.parametrize("refused", ["join", "push"])
def test_an_error_is_part_of_no_cycle(refused):
    """Its traceback refers to connections and buckets, which a cycle would keep for a long time."""

    async def body() -> weakref.ref[RefusedError]:
        server: Any = Refusing(refused)
        sources: Any = [Source(0)]
        connection = GroupConnection(server, sources, {0: 3}, 20.0, "host")
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
        assert asyncio.run(asyncio.wait_for(body(), 60))() is None
    finally:
        gc.enable()
