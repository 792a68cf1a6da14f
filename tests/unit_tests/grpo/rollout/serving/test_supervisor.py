# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A launched server that has closed its socket and does not end is ended; a frozen one is not."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config import Inference
from torchtitan.grpo.inference.local_servers import LaunchedServer, free_ports
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.rollout.serving import supervisor
from torchtitan.grpo.system.child import start_child

# Listens until SIGUSR1, and then hangs, as vLLM does when its engine has died.
PROGRAM = """
import signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: listener.close())
print("listens", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[LaunchedServer]:
    monkeypatch.setattr(supervisor, "_LISTEN_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "_DEAF_SECONDS", 0.5)
    (port,) = free_ports(1)
    log = tmp_path / "server.log"
    process = start_child([sys.executable, "-c", PROGRAM, str(port)], log_file=log)
    launched = LaunchedServer(ServerSpec("vllm", "m", port, "cpu", "float32", 64, 1), process, log)
    while "listens" not in log.read_text():
        assert process.poll() is None, log.read_text()
    yield launched
    launched.stop(grace_seconds=0.0)


def supervise(server: LaunchedServer, seconds: float) -> str | None:
    """Returns how the server has ended; None if it has not within ``seconds``."""
    client: Any = SimpleNamespace(url=server.url)
    dispatcher: Any = SimpleNamespace(set_down=lambda url, reason: None)
    one = supervisor.Supervisor(server, client, Inference(max_restarts=0))

    async def run() -> str | None:
        try:
            async with asyncio.timeout(seconds):
                return await one.run(dispatcher)
        except TimeoutError:
            return None

    return asyncio.run(run())


def test_a_server_that_no_longer_listens_is_ended(server: LaunchedServer):
    server.process.send_signal(signal.SIGUSR1)
    end = supervise(server, 60.0)
    assert end is not None and "It was stopped, because it had not listened for 0.5 s." in end
    assert server.process.poll() == -signal.SIGKILL


def test_a_server_that_is_frozen_is_left_to_the_weight_pusher(server: LaunchedServer):
    os.killpg(server.process.pid, signal.SIGSTOP)
    assert supervise(server, 2.0) is None
    assert server.process.poll() is None
