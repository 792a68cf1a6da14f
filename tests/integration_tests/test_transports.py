# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every weight transport must do, with healthy, late, stopped and dead servers.

The trainer's own publisher, on one rank in this process, pushes the shipped tiny model to real
embedded servers. All transports run the same tests; NCCL groups share all but the collective
with gloo's, and need a GPU.
"""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ForkServer
from lone_trainer import MODEL, PATIENCE, LoneTrainer, ask, checksums, wait_until
from server_kinds import LONG, held_port, python_of

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.lane import LaneState
from torchtitan.grpo.weight_sync.leader import max_alive

# What needs no more than one of them is tested with all of them in the long suite.
TRANSPORTS = {"group": {}, "delta": {"delta": True}, "disk": {"transport": "disk"}}
ONE = ("group", *(pytest.param(name, marks=pytest.mark.long) for name in ("delta", "disk")))


class Servers:
    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self._folder, self._fork_server = folder, fork_server
        self._ports = [held_port() for _ in range(2)]
        self._servers: dict[int, LaunchedServer] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self, *indices: int) -> None:
        started = []
        for index in indices:
            server = self._servers.get(index)
            if server is None or server.process.poll() is not None:
                port = self._ports[index]
                spec = ServerSpec("embedded", str(MODEL), port, "cpu", "float32", 64, 4)
                log = self._folder / f"server-{index}.log"
                self._servers[index] = self._fork_server.start_server(spec, log)
                started.append(self._servers[index])
        asyncio.run(_wait_until_up(started))

    def signal(self, index: int, signum: signal.Signals) -> None:
        process = self._servers[index].process
        if process.poll() is None:
            os.killpg(process.pid, signum)

    def kill(self, index: int) -> None:
        self.signal(index, signal.SIGKILL)
        self._servers[index].process.wait(10)

    def stop(self) -> None:
        for index, server in self._servers.items():
            self.signal(index, signal.SIGCONT)
            server.stop()


async def _wait_until_up(servers: list[LaunchedServer]) -> None:
    clients = [make_client("embedded", server.url) for server in servers]
    try:
        if servers:
            await wait_until_up(clients, servers, timeout_seconds=PATIENCE)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


@pytest.fixture(scope="module")
def all_servers(tmp_path_factory, fork_server) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"), fork_server)
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def servers(all_servers: Servers) -> Iterator[Servers]:
    all_servers.start(0, 1)
    yield all_servers
    for index in (0, 1):
        all_servers.signal(index, signal.SIGCONT)


@pytest.fixture
def train(only_rank: None, tmp_path: Path) -> Iterator[Callable[..., LoneTrainer]]:
    trainings: list[LoneTrainer] = []

    def start(urls: list[str], **sync: Any) -> LoneTrainer:
        trainings.append(LoneTrainer(urls, tmp_path / "versions", **sync))
        return trainings[-1]

    yield start
    for training in trainings:
        training.publisher.close(15)
        assert training.publisher.error is None
        assert not training.publisher._thread.is_alive()


@pytest.fixture(params=TRANSPORTS)
def sync(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TRANSPORTS[request.param]


# For tests that must lose no server, however busy the machine is.
PATIENT = {"control_seconds": 60.0, "timeout_seconds": 60.0, "push_timeout_seconds": 180.0}

one_transport = pytest.mark.parametrize("sync", ONE, indirect=True)


def test_every_version_arrives_whole_at_all_servers(sync, servers, train):
    training = train(servers.urls, **sync, **PATIENT)
    sizes = []
    for _ in range(6):
        training.publish()
        for url in servers.urls:
            training.assert_serves_newest(url)
            report = training.lane(url).last_push
            assert report is not None
            sizes.append(report.num_bytes)
    for url in servers.urls:
        assert training.versions_told(url) == [0, 1, 2, 3, 4, 5]
    assert training.publisher.num_failures == 0
    assert sizes[0] == sizes[1] == full_size(training)
    # A hundredth of the elements changes; each costs a delta its four bytes and where it is.
    assert (max(sizes[2:]) < sizes[0] / 20) == ("delta" in sync)


def full_size(training: LoneTrainer) -> int:
    return sum(4 * parameter.numel() for parameter in training.model.parameters())


def test_a_server_that_comes_late_or_again_is_sent_everything_before_it_counts(
    sync, servers, train
):
    first, other = servers.urls
    servers.kill(1)
    training = train(servers.urls, **sync, **PATIENT)
    for _ in range(3):
        training.publish()
        training.wait_served(first)
    training.wait_lost(other)
    servers.start(1)
    training.assert_serves_newest(other)
    assert sorted(set(training.versions_told(first))) == [0, 1, 2]
    training.publish()
    training.assert_serves_newest(other)
    servers.kill(1)
    training.publish()
    training.wait_served(first)
    training.wait_lost(other)
    servers.start(1)
    training.assert_serves_newest(other)
    assert [v for v in training.versions_told(other) if v >= 0] == [2, 3, 4]
    report = training.lane(other).last_push
    assert report is not None
    assert report.num_bytes == full_size(training)


@one_transport
def test_a_stopped_server_is_lost_while_the_others_go_on_and_rejoins(sync, servers, train):
    first, stopped = servers.urls
    training = train(servers.urls, **sync, control_seconds=6.0, timeout_seconds=8.0)
    bound = max_alive(WeightSync(delta=sync.get("delta", False)), num_servers=2)
    training.publish()
    for url in servers.urls:
        training.assert_serves_newest(url)
    servers.signal(1, signal.SIGSTOP)
    alive = []
    for _ in range(12):
        training.publish()
        training.wait_served(first)
        alive.append(training.publisher.metrics()["weight_sync/versions_alive"])
    assert max(alive) <= bound
    training.wait_lost(stopped)
    assert -1 not in training.versions_told(first)
    servers.signal(1, signal.SIGCONT)
    training.publish()
    for url in servers.urls:
        training.assert_serves_newest(url)
    assert training.publisher.metrics()["weight_sync/versions_alive"] <= bound
    # Of what it missed, it was told nothing.
    assert training.versions_told(stopped)[0] == 0
    assert set(training.versions_told(stopped)[1:]) <= {-1, 12, 13}


@one_transport
def test_servers_leave_and_come_while_training_goes_on(sync, servers, train):
    first, second = servers.urls
    training = train([first], **sync, **PATIENT)
    training.publish()
    training.assert_serves_newest(first)
    training.news.append([ServerInfo(url, "embedded") for url in servers.urls])
    wait_until(lambda: len(training.publisher.lanes) == 2, "a second lane")
    training.assert_serves_newest(second)
    training.news.append([ServerInfo(second, "embedded")])
    wait_until(lambda: len(training.publisher.lanes) == 1, "the first lane's end")
    wait_until(lambda: not ask(first, "/server_info")["weight_groups"], "no group is left")
    training.publish()
    training.assert_serves_newest(second)
    assert training.versions_told(first) == [0]
    training.news.append([ServerInfo(url, "embedded") for url in servers.urls])
    wait_until(lambda: len(training.publisher.lanes) == 2, "the first lane's return")
    training.assert_serves_newest(first)


@one_transport
def test_the_next_trainer_joins_servers_that_one_has_left_amid_a_push(sync, servers, train):
    training = train(servers.urls, **sync)
    training.publish_until_under_way(servers.urls[0])
    training.publisher.close(15)
    following = train(servers.urls, **sync)
    following.publish()
    for url in servers.urls:
        following.assert_serves_newest(url)


def test_a_full_disk_loses_no_version_but_the_one_it_stopped(servers, train):
    training = train(servers.urls, transport="disk", **PATIENT)
    training.publish()
    for url in servers.urls:
        training.assert_serves_newest(url)
    with file_size_limit(full_size(training) // 2):
        training.publish()
        for url in servers.urls:
            wait_until(lambda url=url: training.lane(url).last_error, "a failure to write")
            lane = training.lane(url)
            assert "Is the disk full?" in lane.last_error
            assert (lane.state, lane.version, lane.num_failures) == (LaneState.READY, 0, 0)
            assert ask(url, "/server_info")["weight_version"] == "0"
            assert checksums(url) == training.expected[0]
    for url in servers.urls:
        training.assert_serves_newest(url)


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["embedded", *LONG])
def test_a_whole_run_pushes_through_a_directory(kind, make_run, tmp_path):
    more = []
    if kind != "embedded":
        more = [f"--inference.kind={kind}", f"--inference.python={python_of(kind)}"]
    run = make_run(
        "--weight_sync.transport=disk",
        f"--weight_sync.disk_path={tmp_path / 'versions'}",
        "--weight_sync.attest_every=2",
        "--rollout.max_head_offpolicyness=0",
        "--training.steps=4",
        "--grpo.prompts_per_step=4",
        "--evaluation.num_prompts=8",
        *more,
    )
    run.succeed()
    last = run.metrics[-1]
    assert last["weight_sync/failures"] == 0
    assert last["weight_sync/attested"] > 0
    # Without staleness the trainer scores what was sampled from the version pushed last.
    assert all(record["mismatch/kl"] < 1e-4 for record in run.metrics)
    left = {path.name for path in (tmp_path / "versions").iterdir()}
    assert "version-4" in left
    assert left <= {"version-3", "version-4"}
