# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts embedded servers that stand for servers on other machines, and disturbs them."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer, start_server
from torchtitan.grpo.system.child import stop_children

SERVER_NICE = 5
"""Nice value of the servers. With a higher value they could not receive one version per step while
both ranks compute."""
AUTOGROUP_SECONDS = 0.2
"""Pause between two changes of an autogroup's nice value. Linux refuses a second change within a
tenth of a second unless the caller is root."""
STARTUP_SECONDS = 240.0
STOPPED_SECONDS, RUNNING_SECONDS = 0.09, 0.01
"""A throttled process is stopped and continued for these times in turn."""


class Throttle:
    """Lets a process run for a tenth of the time, from :meth:`start` to :meth:`stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        signal_process(self._pid, signal.SIGCONT)

    def _run(self) -> None:
        while not self._ending.is_set() and signal_process(self._pid, signal.SIGSTOP):
            self._ending.wait(STOPPED_SECONDS)
            signal_process(self._pid, signal.SIGCONT)
            self._ending.wait(RUNNING_SECONDS)


def signal_process(pid: int, signum: int) -> bool:
    """Signals a process; returns False if it has ended."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def running_servers(count: int, model: Path, folder: Path) -> Iterator[list[LaunchedServer]]:
    """Yields embedded servers that are up, and ends all of them, including stopped ones."""
    servers = []
    held = HeldPorts(count)
    try:
        for index, port in enumerate(held.ports):
            spec = ServerSpec("embedded", str(model), port, "cpu", "float32", 128, 4)
            servers.append(start_server(spec, folder / f"server-{index}.log"))
            give_way(servers[-1].process.pid)
        for server in servers:
            wait_for_server(server, STARTUP_SECONDS)
        yield servers
    finally:
        stop_children([server.process for server in servers])
        held.close()


def give_way(pid: int) -> None:
    """Lowers the priority of a process before it starts threads, which inherit the priority.

    The servers stand for servers on other machines. Where Linux groups tasks by session
    (autogroup), the session's nice value decides between a server and a rank.
    """
    os.setpriority(os.PRIO_PROCESS, pid, SERVER_NICE)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        time.sleep(AUTOGROUP_SECONDS)
        group.write_text(str(SERVER_NICE))


def wait_for_server(server: LaunchedServer, timeout_seconds: float) -> None:
    """Returns when the server answers that it is up.

    Raises:
        RuntimeError: If the server has ended or did not come up in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not asyncio.run(_is_up(server)):
        if time.monotonic() > deadline or server.process.poll() is not None:
            raise RuntimeError(f"The {server.kind} server did not start. {server.describe_log()}")
        time.sleep(0.2)


async def _is_up(server: LaunchedServer) -> bool:
    client = make_client(server.kind, server.url, control_timeout_seconds=2.0)
    try:
        await client.health()
    except ServerError:
        return False
    finally:
        await client.close()
    return True
