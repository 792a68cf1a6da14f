# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every weight transport must do, with healthy, late, slow, stopped and dead servers.

The trainer's own publisher, on one rank in this process, pushes the shipped tiny model to real
embedded servers. All transports run the same tests; NCCL groups share all but the collective
with gloo's, and need a GPU.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from forked import ForkServer
from server_kinds import LONG, python_of

from torchtitan.grpo.system.device import settle_device

settle_device()

from torchtitan.grpo.config import WeightSync  # noqa: E402
from torchtitan.grpo.config_manager import JobConfig  # noqa: E402
from torchtitan.grpo.inference.embedded.weights import tensor_sha256  # noqa: E402
from torchtitan.grpo.inference.kinds import make_client  # noqa: E402
from torchtitan.grpo.inference.local_servers import (  # noqa: E402
    LaunchedServer,
    free_ports,
)
from torchtitan.grpo.inference.server_spec import ServerSpec  # noqa: E402
from torchtitan.grpo.inference.waiting import wait_until_up  # noqa: E402
from torchtitan.grpo.models.hf_config import read_hf_model  # noqa: E402
from torchtitan.grpo.models.hf_weights import full_hf_tensors, load_hf_weights  # noqa: E402
from torchtitan.grpo.system.rank_channel import RankChannel  # noqa: E402
from torchtitan.grpo.training.model_spec import hf_train_spec  # noqa: E402
from torchtitan.grpo.types import ServerInfo  # noqa: E402
from torchtitan.grpo.weight_sync.build import build_publisher  # noqa: E402
from torchtitan.grpo.weight_sync.lane import Lane, LaneState  # noqa: E402
from torchtitan.grpo.weight_sync.leader import max_alive  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "assets/reverse_digits/model"
PATIENCE = 300.0
# What needs no more than one of them is tested with all of them in the long suite.
TRANSPORTS = {"group": {}, "delta": {"delta": True}, "disk": {"transport": "disk"}}
ONE = ("group", *(pytest.param(name, marks=pytest.mark.long) for name in ("delta", "disk")))
T = TypeVar("T")


def wait_until(look: Callable[[], T | None], what: str, poll_seconds: float = 0.01) -> T:
    """Calls ``look`` until it returns something true, and returns that."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(poll_seconds)
    return found


def ask(url: str, route: str, **body: Any) -> Any:
    """The server's answer; posts where there is a body."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def checksums(url: str) -> dict[str, str]:
    """Returns the SHA-256 of each parameter of the server."""
    return ask(url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]


class Servers:
    """Two servers that all tests share; a server that a test has killed is started again."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self._folder, self._fork_server = folder, fork_server
        self._ports = free_ports(2)
        self._servers: dict[int, LaunchedServer] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self, *indices: int) -> None:
        """Starts the servers that do not run; returns when they answer."""
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
    """Both servers, up before the test and running again after it."""
    all_servers.start(0, 1)
    yield all_servers
    for index in (0, 1):
        all_servers.signal(index, signal.SIGCONT)


@pytest.fixture(scope="module")
def only_rank() -> Iterator[None]:
    """Makes this process the only rank of a training run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Training:
    """A model, its publisher, and the notices that the rollout process would receive."""

    def __init__(self, urls: list[str], disk_path: Path, **sync: Any) -> None:
        config = JobConfig()
        config.model.hf_assets_path = str(MODEL)
        config.training.seq_len = 32
        config.training.mixed_precision_param = "float32"
        config.inference.control_timeout_seconds = 2.0
        settings = {
            "bucket_bytes": 60_000,
            "attest_every": 0,
            "timeout_seconds": 3.0,
            "push_timeout_seconds": 12.0,
            "retry_seconds": 0.1,
            "max_retry_seconds": 0.5,
        }
        if sync.get("transport") == "disk":
            settings["disk_path"] = str(disk_path)
        for key, value in (settings | sync).items():
            setattr(config.weight_sync, key, value)
        hf_model = read_hf_model(str(MODEL))
        model_args: Any = hf_model.model_args
        model_args.update_from_config(config)
        spec = hf_train_spec(hf_model, config)
        with torch.device("meta"):
            self.model: Any = spec.model_cls(model_args)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        assert spec.state_dict_adapter is not None
        self.adapter = spec.state_dict_adapter(model_args, str(MODEL))
        load_hf_weights([self.model], self.adapter, MODEL)
        self.version = -1
        self.expected: dict[int, dict[str, str]] = {}
        self.told: list[tuple[str, int]] = []
        self.news: list[list[ServerInfo]] = []
        link: Any = SimpleNamespace(
            notify_version=lambda url, version: self.told.append((url, version)),
            notify_lost=lambda url, reason: self.told.append((url, -1)),
            watch=SimpleNamespace(poll=lambda: self.news.pop(0) if self.news else None),
        )
        infos = [ServerInfo(url, "embedded") for url in urls]
        self.publisher = build_publisher(
            config,
            [self.model],
            self.adapter,
            torch.device("cpu"),
            RankChannel(60.0, print),
            link,
            infos,
            128,
        )

    def publish(self) -> int:
        """Changes a few elements of every parameter, and publishes them."""
        self.version += 1
        slot = self.publisher.reserve_slot()
        self.publisher.fence()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.view(-1)[self.version % 7 :: 101] += 0.01
        self.publisher.publish(self.version, slot)
        whole = full_hf_tensors([self.model], self.adapter, torch.float32)
        self.expected[self.version] = {name: tensor_sha256(tensor) for name, tensor in whole}
        return self.version

    def publish_until_under_way(self, url: str) -> None:
        """Publishes until a push to the server is seen in progress; each push is short."""

        def is_under_way() -> bool:
            if not self.publisher.lanes:
                return False  # its thread has only just been started
            lane = self.lane(url)
            if lane.state is LaneState.READY and lane.version == self.version:
                self.publish()
            return lane.state is LaneState.SYNCING

        self.publish()
        wait_until(is_under_way, f"a push to {url}", poll_seconds=0.001)

    def lane(self, url: str) -> Lane:
        (lane,) = [lane for lane in self.publisher.lanes if lane.url == url]
        return lane

    def wait_served(self, url: str, version: int | None = None) -> None:
        """Returns when the server's lane is ready with the version, by default the newest."""
        wanted = self.version if version is None else version

        def is_served() -> bool:
            self.publisher.raise_if_failed()
            if not self.publisher.lanes:
                return False  # its thread has only just been started
            lane = self.lane(url)
            return lane.version >= wanted and lane.state is LaneState.READY

        wait_until(is_served, f"{url} serves version {wanted}")

    def wait_lost(self, url: str) -> None:
        wait_until(lambda: self.lane(url).is_lost, f"{url} is lost")

    def assert_serves_newest(self, url: str) -> None:
        self.wait_served(url)
        assert ask(url, "/server_info")["weight_version"] == str(self.version)
        assert checksums(url) == self.expected[self.version]

    def versions_told(self, url: str) -> list[int]:
        """Returns the reported versions in order, with -1 for a loss."""
        versions = [version for told, version in self.told if told == url]
        # An idle lane says again what its server has.
        return [version for version, _ in groupby(versions)]


@pytest.fixture
def train(only_rank: None, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings, and ends them."""
    trainings: list[Training] = []

    def start(urls: list[str], **sync: Any) -> Training:
        trainings.append(Training(urls, tmp_path / "versions", **sync))
        return trainings[-1]

    yield start
    for training in trainings:
        training.publisher.close(15)
        assert training.publisher.error is None
        assert not training.publisher._thread.is_alive()


@pytest.fixture(params=TRANSPORTS)
def sync(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TRANSPORTS[request.param]


one_transport = pytest.mark.parametrize("sync", ONE, indirect=True)


def test_every_version_arrives_whole_at_all_servers(sync, servers, train):
    training = train(servers.urls, **sync)
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


def full_size(training: Training) -> int:
    """Returns the bytes of the model in a full push."""
    return sum(4 * parameter.numel() for parameter in training.model.parameters())


def test_a_server_that_comes_late_or_again_is_sent_everything_before_it_counts(
    sync, servers, train
):
    first, other = servers.urls
    servers.kill(1)
    training = train(servers.urls, **sync)
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
    training = train(servers.urls, **sync)
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
    assert training.lane(first).num_failures == 0
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
    training = train([first], **sync)
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
    training = train(servers.urls, transport="disk")
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
    """Makes the kernel refuse files of this process beyond a size, as a full disk does."""
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
