# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server that suffers faults, a healthy server, and loops that push to both."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from forked import ForkServer
from loop_driver import Event, PublishingLoop, processes_of, tcp_ports_of
from tagged import TaggedModel, save_model

from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import (
    HeldPorts,
    LaunchedServer,
)
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.types import ServerKind

TIMEOUT_SECONDS = 6.0
PUSH_TIMEOUT_SECONDS = 15.0
TOLERANCE = 1e-3
WEIGHT_SYNC = {
    "checksum": True,
    "bucket_bytes": 65536,
    "timeout_seconds": TIMEOUT_SECONDS,
    "push_timeout_seconds": PUSH_TIMEOUT_SECONDS,
    "retry_seconds": 0.2,
    "max_retry_seconds": 0.5,
    "attest_every": 1,
}
# What a wait within the program may last beyond its own bound: the machine may be busy.
_SLACK_SECONDS = 5.0
_PATIENCE_SECONDS = 180.0
_START_SECONDS = 480.0


class FaultRig:
    def __init__(
        self, kind: ServerKind, python: str | None, folder: Path, fork_server: ForkServer
    ) -> None:
        save_model(folder / "model")
        self.model = TaggedModel(folder / "model")
        self.kind, self._folder, self._num_starts = kind, folder, 0
        self._fork_server = fork_server
        self._ports = HeldPorts(2)
        spec = ServerSpec(
            kind, str(folder / "model"), self._ports.ports[0], "cpu", "float32", 256, 16, python
        )
        self.server = self._start(spec)
        healthy = replace(spec, kind="embedded", port=self._ports.ports[1], python=None)
        self._healthy = self._start(healthy)
        self.url = self.server.url
        self.loop, self.next_loop = (self._make_loop(number) for number in (1, 2))

    def _start(self, spec: ServerSpec) -> LaunchedServer:
        self._num_starts += 1
        return self._fork_server.start_server(
            spec, self._folder / f"{spec.kind}-{self._num_starts}.log"
        )

    def _make_loop(self, number: int) -> PublishingLoop:
        return PublishingLoop(
            self._folder / f"loop-{number}",
            fork_server=self._fork_server,
            model=str(self._folder / "model"),
            servers=[[self.url, self.kind], [self._healthy.url, "embedded"]],
            weight_sync=WEIGHT_SYNC,
            control_timeout_seconds=TIMEOUT_SECONDS,
            waits=True,
        )

    def begin(self) -> None:
        """Waits until both servers are up, and lets the first loop push."""
        for server in (self.server, self._healthy):
            self._wait_until_up(server)
        self.loop.wait_for("loaded", timeout_seconds=_START_SECONDS)
        self.loop.command("go", start_version=0)
        self.wait_for_push()

    def _wait_until_up(self, server: LaunchedServer) -> None:
        async def wait() -> None:
            client = make_client(server.kind, server.url)
            try:
                await wait_until_up([client], [server], _START_SECONDS)
            finally:
                await client.close()

        asyncio.run(wait())

    # -- faults ------------------------------------------------------------------------

    @contextmanager
    def stopped_at(self, method: str, when: str, index: int = 0) -> Iterator[int]:
        mark = self.loop.mark()
        self.loop.command("stop", url=self.url, method=method, when=when, index=index)
        self.loop.wait_for("stopped", mark, _PATIENCE_SECONDS, url=self.url)
        yield mark
        if self.loop.process.poll() is None:
            self.loop.command("release")

    def signal_server(self, signum: int) -> None:
        os.killpg(self.server.process.pid, signum)

    def kill_server(self) -> None:
        """Kills all processes of the server, and waits until they are gone."""
        processes = processes_of(self.server.process.pid)
        self.signal_server(signal.SIGKILL)
        self.server.process.wait(10)
        assert not psutil.wait_procs(processes, timeout=10)[1]

    def restart_server(self) -> float:
        """Restarts the server at its old address with its first weights; returns when it came up."""
        self.server = self._start(self.server.spec)
        self._wait_until_up(self.server)
        return time.monotonic()

    def group_ports(self) -> list[int]:
        http = self.server.spec.port
        return [port for port in tcp_ports_of(self.server.process.pid) if port != http]

    # -- what must hold ----------------------------------------------------------------

    def wait_for_push(self, since: int = 0, after: float = 0.0) -> Event:
        return self.loop.wait_for(
            "version", since, _PATIENCE_SECONDS, url=self.url, holds=lambda e: e["at"] > after
        )

    def wait_for_loss(self, since: int) -> Event:
        return self.loop.wait_for("lost", since, _PATIENCE_SECONDS, url=self.url)

    def is_lost_or_serves(self, version: int, since: int) -> str:
        return self.loop.wait_for(
            ("lost", "version"),
            since,
            _PATIENCE_SECONDS,
            url=self.url,
            holds=lambda e: e["event"] == "lost" or e["version"] >= version,
        )["event"]

    def wait_for_others(self, count: int = 3) -> None:
        """Waits until the loop publishes further versions that reach the healthy server."""
        for _ in range(count):
            mark = self.loop.mark()
            self.loop.wait_for("publish", mark, _PATIENCE_SECONDS)
            self.loop.wait_for("version", mark, _PATIENCE_SECONDS, url=self._healthy.url)

    def wait_for_error(self) -> str:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            mark = self.loop.mark()
            self.loop.command("status")
            error = self.loop.wait_for("status", mark)["errors"].get(self.url)
            if error:
                return error
            assert time.monotonic() < deadline, "no error"
            time.sleep(0.1)

    def assert_recovered(self, since: int, back_at: float) -> None:
        attested = self.wait_for_push(since, after=back_at)
        pushes = [
            event
            for event in self.loop.of_kind("begun", since, url=self.url)
            if back_at < event["at"] < attested["at"]
        ]
        assert len(pushes) <= 2, pushes
        self.wait_for_others(1)
        # Completions of the server that it began and ended under attested weights.
        self.loop.wait_for(
            "sample", since, _PATIENCE_SECONDS, url=self.url,
            holds=lambda e: e["segments"][0][0] >= attested["version"],
        )  # fmt: skip
        self._assert_nothing_waited_long(since)
        self._assert_samples_are_what_they_say(since)
        self._assert_no_thread_is_left()

    def _assert_nothing_waited_long(self, since: int) -> None:
        boundaries = [e["boundary_seconds"] for e in self.loop.of_kind("publish", since)]
        assert boundaries and max(boundaries) < TIMEOUT_SECONDS / 2, max(boundaries)
        for call in self.loop.of_kind("call", since, url=self.url):
            bound = TIMEOUT_SECONDS
            if call["method"] == "update_from_disk":
                bound = PUSH_TIMEOUT_SECONDS
            assert call["seconds"] < bound + _SLACK_SECONDS, call

    def _assert_samples_are_what_they_say(self, since: int) -> None:
        samples = sorted(self.loop.of_kind("sample", since), key=lambda s: s["segments"][0])
        assert samples
        for sample in samples:
            error = self.model.sample_error(sample)
            assert error < TOLERANCE, (error, sample)
            assert sample["segments"][0][0] >= sample["attested"], sample

    def _assert_no_thread_is_left(self) -> None:
        """Waits until abandoned broadcasts have ended, at the group's timeout at the latest."""
        deadline = time.monotonic() + TIMEOUT_SECONDS + _SLACK_SECONDS
        while True:
            mark = self.loop.mark()
            self.loop.command("status")
            threads = self.loop.wait_for("status", mark)["threads"]
            pushing = [name for name in threads if name.startswith("weight-push")]
            if len(pushing) <= 2:
                return
            assert time.monotonic() < deadline, pushing
            time.sleep(0.2)

    # -- end ---------------------------------------------------------------------------

    def end(self) -> None:
        threads = self.loop.end()["threads"]
        left = [name for name in threads if name.startswith(("weight", "snapshot", "sampler"))]
        assert not left, left
        assert self.server.process.poll() is None, self.server.log_tail()

    def close(self) -> None:
        """Ends all processes in any state; fails if one is left."""
        children = psutil.Process().children(recursive=True)
        for loop in (self.loop, self.next_loop):
            loop.close()
        for server in (self.server, self._healthy):
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGCONT)
            server.stop()
        self._ports.close()
        left = psutil.wait_procs(children, timeout=30)[1]
        assert not left, left
