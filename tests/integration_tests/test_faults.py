# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Faults of a real server or of the trainer during a push, for each kind of server.

A loop publishes tagged versions about five times a second to a server of the kind under test and
to a healthy embedded one, and keeps completions in flight on both (`programs/publishing_loop.py`).
A test stops the loop at a named point of a push, causes a fault, and lets the loop continue. After
each fault `FaultRig.assert_recovered` checks that publishing continued without waiting for a
server, that the healthy server followed, that the logprobs of every accepted completion are, by
transformers, those of the versions that it names, that the server confirmed a version by the
second push after its return, that no request exceeded its timeout, and that no thread is left.
"""

import signal
import time
from collections.abc import Iterator

import pytest
from fault_rig import FaultRig
from server_kinds import REAL

from torchtitan.grpo.types import ServerKind

pytestmark = pytest.mark.slow


def each_kind(*short: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the kind of server. Those that are not named are of the long suite.

    In the short suite `test_real_servers.py` stops servers of the other kinds.
    """
    marks = {k: [] if k in short else [pytest.mark.long] for k in ("embedded", *REAL)}
    for kind in REAL:
        marks[kind].append(getattr(pytest.mark, kind))
    kinds = [pytest.param(kind, marks=marks[kind]) for kind in marks]
    return pytest.mark.parametrize("server_kind", kinds, indirect=True)


@pytest.fixture(scope="module")
def rig(
    server_kind: tuple[ServerKind, str | None], tmp_path_factory, fork_server
) -> Iterator[FaultRig]:
    """Servers and loops; after each test the server receives pushes and the loop publishes."""
    kind, python = server_kind
    folder = tmp_path_factory.mktemp(kind)
    rig = FaultRig(kind, python, folder, fork_server)
    try:
        rig.begin()
        yield rig
        rig.end()
    finally:
        rig.close()


@each_kind("embedded")
def test_a_corrupted_bucket_is_found_out(rig: FaultRig) -> None:
    """A server that compares no checksums is found out by the logprobs of the attestation.

    On a busy machine the loop may have published several versions before a server is asked for
    logprobs, and does not keep its own of so old a version. Then another bucket is corrupted.
    """
    for _ in range(20):
        mark = rig.loop.mark()
        rig.loop.command("corrupt", url=rig.url)
        corrupted = rig.loop.wait_for("corrupted", mark, url=rig.url)["version"]
        if rig.is_lost_or_serves(corrupted, mark) == "lost":
            break
    lost = rig.wait_for_loss(mark)
    found_by = "log-probabilities" if rig.kind == "sglang" else "must have checksum"
    assert found_by in lost["reason"]
    confirmed = rig.loop.of_kind("version", mark, url=rig.url, version=corrupted)
    assert all(event["at"] > lost["at"] for event in confirmed), "it was sent anew after that"
    rig.assert_recovered(mark, lost["at"])


@each_kind("embedded")
def test_a_server_that_stands_still_amid_the_transfer_rejoins_when_it_goes_on(
    rig: FaultRig,
) -> None:
    with rig.stopped_at("receive_bucket", "after", 1) as mark:
        rig.signal_server(signal.SIGSTOP)
    try:
        rig.wait_for_loss(mark)
        rig.wait_for_others()
    finally:
        rig.signal_server(signal.SIGCONT)
    rig.assert_recovered(mark, time.monotonic())


@each_kind("embedded")
def test_a_half_closed_socket_of_the_weight_group_costs_no_more_than_the_push(
    rig: FaultRig,
) -> None:
    """The trainer's ends of the group's connections are shut down for writing."""
    with rig.stopped_at("receive_bucket", "after", 1) as mark:
        rig.loop.command("half_close", ports=rig.group_ports())
        assert rig.loop.wait_for("half_closed", mark)["count"] > 0
    lost = rig.wait_for_loss(mark)
    rig.assert_recovered(mark, lost["at"])


@each_kind("embedded")
def test_half_closed_http_connections_cost_no_more_than_their_requests(rig: FaultRig) -> None:
    """Generation is always in flight; control requests in flight are affected, too."""
    first, closed = rig.loop.mark(), 0
    for _ in range(8):
        mark = rig.loop.mark()
        rig.loop.command("half_close", ports=[rig.server.spec.port])
        event = rig.loop.wait_for("half_closed", mark)
        closed += event["count"]
    assert closed > 0
    rig.assert_recovered(first, event["at"])


@each_kind("embedded")
def test_a_trainer_killed_amid_a_push_leaves_servers_to_the_next(rig: FaultRig) -> None:
    """vLLM is paused only for the commit, SGLang from the beginning of the update."""
    where = ("commit_update", "before", 0) if rig.kind == "vllm" else ("receive_bucket", "after", 1)
    with rig.stopped_at(*where):
        rig.loop.kill()
    rig.loop.close()
    rig.loop, old = rig.next_loop, rig.loop
    rig.next_loop = old
    rig.loop.wait_for("loaded")
    rig.loop.command("go", start_version=5000)
    began = rig.loop.wait_for("began")
    assert rig.server.process.poll() is None, rig.server.log_tail()
    rig.assert_recovered(0, began["at"])


@each_kind("embedded")
def test_a_server_killed_during_the_transfer_comes_back_with_old_weights_and_rejoins(
    rig: FaultRig,
) -> None:
    _kill_at(rig, "receive_bucket", "after", 1)


# These differ from the test above in the moment alone.
@each_kind()
@pytest.mark.parametrize(
    ("method", "when"),
    [("begin_update", "before"), ("commit_update", "after")],
    ids=["before", "after"],
)
def test_a_server_killed_around_the_transfer_comes_back_with_old_weights_and_rejoins(
    rig: FaultRig, method: str, when: str
) -> None:
    _kill_at(rig, method, when, 0)


def _kill_at(rig: FaultRig, method: str, when: str, index: int) -> None:
    with rig.stopped_at(method, when, index) as mark:
        rig.kill_server()
    rig.wait_for_loss(mark)
    rig.wait_for_others()
    rig.assert_recovered(mark, rig.restart_server())
