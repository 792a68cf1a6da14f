"""Faults of a real server during a push, for each kind of server.

A trainer in this process pushes to a server of the kind under test and to a healthy embedded one. A
push is held at a named call, a fault is caused, and the call goes on. Then the other server must have
followed, and the server must serve the newest weights again, by transformers. How completions fare
among faults is tested by `benchmarks/torn_free.py`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from bare_trainer import assert_serves, make_model
from forked import ForkServer
from lone_trainer import LoneTrainer, wait_until
from server_kinds import REAL
from tagged import save_model

from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.types import ServerKind
from torchtitan.grpo.weight_sync import build

pytestmark = pytest.mark.slow


class Gate:
    """Where the next call of one method to one server waits for its fault."""

    def __init__(self) -> None:
        self.point: tuple[str, str, str] | None = None
        self.reached, self.released = threading.Event(), threading.Event()

    async def reach(self, *point: str) -> None:
        if self.point == point:
            self.point = None
            self.reached.set()
            await asyncio.to_thread(self.released.wait, 60)


class GatedClient:
    def __init__(self, inner: Any, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in ("begin_update", "receive_bucket", "commit_update"):
            return attribute

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._gate.reach(self._inner.url, name, "before")
            result = await attribute(*arguments, **options)
            await self._gate.reach(self._inner.url, name, "after")
            return result

        return call


class Rig:
    def __init__(
        self,
        kind: ServerKind,
        python: str | None,
        folder: Path,
        fork_server: ForkServer,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self._folder, self._fork_server, self.gate = folder, fork_server, Gate()
        client_for = build.client_for
        patch.setattr(build, "client_for", lambda *args: GatedClient(client_for(*args), self.gate))
        model = folder / "model"
        save_model(model, make_model(0))
        self._ports = HeldPorts(2)
        port, other = self._ports.ports
        spec = ServerSpec(kind, str(model), port, "cpu", "float32", 256, 16, python)
        self.servers = [self._start(spec)]
        self.servers += [self._start(replace(spec, kind="embedded", port=other, python=None))]
        self.url, self.other_url = (server.url for server in self.servers)
        self._wait_until_up()
        self.trainer = LoneTrainer(
            [self.url, self.other_url], folder, kind=kind, model=model, control_seconds=6.0,
            timeout_seconds=6.0, push_timeout_seconds=15.0,
        )  # fmt: skip

    def _start(self, spec: ServerSpec) -> LaunchedServer:
        return self._fork_server.start_server(spec, self._folder / f"{spec.kind}-{spec.port}.log")

    def _wait_until_up(self) -> None:
        async def wait() -> None:
            clients = [make_client(s.kind, s.url) for s in self.servers]
            try:
                await wait_until_up(clients, self.servers, 480)
            finally:
                await asyncio.gather(*(client.close() for client in clients))

        asyncio.run(wait())

    @contextlib.contextmanager
    def held_at(self, method: str, when: str) -> Iterator[None]:
        gate = self.gate
        gate.reached.clear()
        gate.released.clear()
        gate.point = (self.url, method, when)
        self.trainer.publish()
        assert gate.reached.wait(180)
        try:
            yield
        finally:
            gate.released.set()

    def signal(self, signum: int) -> None:
        os.killpg(self.servers[0].process.pid, signum)

    def go_on_without(self) -> None:
        self.trainer.wait_lost(self.url)
        for _ in range(3):
            self.trainer.publish()
            self.trainer.wait_served(self.other_url)

    def kill(self) -> None:
        process = psutil.Process(self.servers[0].process.pid)
        processes = [process, *process.children(recursive=True)]
        self.signal(signal.SIGKILL)
        self.servers[0].process.wait(10)
        assert not psutil.wait_procs(processes, timeout=10)[1]

    def restart(self) -> None:
        self.servers[0] = self._start(self.servers[0].spec)
        self._wait_until_up()

    def half_close(self, of_group: bool) -> int:
        """Shuts this process's ends of connections to the server down for writing."""
        http = self.servers[0].spec.port
        server = psutil.Process(self.servers[0].process.pid)
        ports = {http}
        if of_group:
            found = [server, *server.children(recursive=True)]
            ports = {c.laddr.port for p in found for c in p.net_connections("tcp")} - {http}
        count = 0
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port in ports:
                # It may have ended in between.
                with contextlib.suppress(OSError):
                    with socket.socket(fileno=os.dup(connection.fd)) as end:
                        end.shutdown(socket.SHUT_WR)
                    count += 1
        return count

    def assert_recovered(self) -> None:
        version = self.trainer.publish()
        for url in (self.url, self.other_url):
            self.trainer.wait_served(url)
        model = make_model(0)
        model.load_state_dict(dict(self.trainer.weights()))

        async def check() -> None:
            for server in self.servers:
                client = make_client(server.kind, server.url)
                try:
                    await assert_serves(client, model, version)
                finally:
                    await client.close()

        asyncio.run(check())
        # Abandoned broadcasts end at the group's timeout at the latest.
        wait_until(lambda: self._num_pushing() <= 2, "no thread is left")

    def _num_pushing(self) -> int:
        return sum(thread.name.startswith("weight-push") for thread in threading.enumerate())

    def close(self) -> None:
        self.trainer.publisher.close(15)
        for server in self.servers:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGCONT)
            server.stop()
        self._ports.close()


@pytest.fixture(scope="module")
def rig(
    server_kind: tuple[ServerKind, str | None], only_rank, tmp_path_factory, fork_server
) -> Iterator[Rig]:
    kind, python = server_kind
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(kind, python, tmp_path_factory.mktemp(kind), fork_server, patch)
        try:
            rig.assert_recovered()
            yield rig
            assert rig.trainer.publisher.error is None
        finally:
            rig.close()


def each_kind(*short: str) -> pytest.MarkDecorator:
    marks = {k: [] if k in short else [pytest.mark.long] for k in ("embedded", *REAL)}
    for kind in REAL:
        marks[kind].append(getattr(pytest.mark, kind))
    kinds = [pytest.param(kind, marks=marks[kind]) for kind in marks]
    return pytest.mark.parametrize("server_kind", kinds, indirect=True)


@each_kind("embedded")
def test_a_server_that_stands_still_amid_the_transfer_rejoins_when_it_goes_on(rig: Rig) -> None:
    try:
        with rig.held_at("receive_bucket", "after"):
            rig.signal(signal.SIGSTOP)
        rig.go_on_without()
    finally:
        rig.signal(signal.SIGCONT)
    rig.assert_recovered()


@each_kind("embedded")
def test_a_half_closed_socket_of_the_weight_group_costs_no_more_than_the_push(rig: Rig) -> None:
    failures = rig.trainer.publisher.num_failures
    with rig.held_at("receive_bucket", "after"):
        assert rig.half_close(of_group=True) > 0
    wait_until(lambda: rig.trainer.publisher.num_failures > failures, "the push fails")
    rig.assert_recovered()


@each_kind("embedded")
def test_half_closed_http_connections_cost_no_more_than_their_requests(rig: Rig) -> None:
    with rig.held_at("receive_bucket", "after"):
        assert rig.half_close(of_group=False) > 0
    rig.assert_recovered()


def _kill_at(rig: Rig, method: str, when: str) -> None:
    with rig.held_at(method, when):
        rig.kill()
    rig.go_on_without()
    rig.restart()
    rig.assert_recovered()


@each_kind("embedded")
def test_a_server_killed_during_the_transfer_comes_back_with_old_weights_and_rejoins(
    rig: Rig,
) -> None:
    _kill_at(rig, "receive_bucket", "after")


# These differ from the test above in the moment alone.
@each_kind()
@pytest.mark.parametrize(
    ("method", "when"), [("begin_update", "before"), ("commit_update", "after")]
)
def test_a_server_killed_around_the_transfer_comes_back_with_old_weights_and_rejoins(
    rig: Rig, method: str, when: str
) -> None:
    _kill_at(rig, method, when)
