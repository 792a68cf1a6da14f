# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a server is asked for in a join and a push, over which backend, and when any of it fails."""

import asyncio
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
from faulty_server import (
    TRAINER,
    FaultyServer,
    RefusedError,
    Server,
    Source,
    bring_two_versions,
    connect,
)

from torchtitan.grpo.weight_sync import lane as lane_module
from torchtitan.grpo.weight_sync.lane import Lane, LaneEvent
from torchtitan.grpo.weight_sync.transports.group_transport import (
    Handshake,
    NcclImpossible,
)
from torchtitan.grpo.weight_wire.group_facts import GroupFacts

EQUAL = replace(TRAINER, gpu="GPU-b")
OTHER = replace(EQUAL, nccl="2.30.7", torch="2.14.1")
UNKNOWN = GroupFacts(device="cuda", hint="It keeps silent.")
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
    lane._listeners.on_version(lane.url, version, 0.0)
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
