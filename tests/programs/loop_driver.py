# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts `publishing_loop.py`, sends it commands, and keeps the events that it reports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil
from forked import ForkedProcess, ForkServer

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.system.child import start_child, stop_children

_PROGRAM = Path(__file__).with_name("publishing_loop.py")

Event = dict[str, Any]


class PublishingLoop:
    """The program on one or several ranks, and this process's end of its socket.

    Make it on the main thread: the processes end with the thread that started them.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int = 1,
        fork_server: ForkServer | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.events: list[Event] = []
        self._told = threading.Condition()
        self._connections: dict[int, Connection] = {}
        # In a private folder of its own choice, since a Unix socket's path must be short.
        self._listener = Listener(family="AF_UNIX")
        self._num_ranks, self._fork_server = num_ranks, fork_server
        self.log_file = folder / "loop.log"
        self._record = (folder / "events.jsonl").open("w")
        self.process = self._start(json.dumps({"socket": self._listener.address, **settings}))
        threading.Thread(target=self._accept, name="loop-accept", daemon=True).start()

    def _start(self, settings: str) -> subprocess.Popen | ForkedProcess:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        ranks = [*("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")]
        command = [*ranks, str(self._num_ranks), str(_PROGRAM), settings]
        if self._num_ranks == 1:
            command = [str(_PROGRAM), settings]
            environment |= {
                "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]),
            }  # fmt: skip
        if self._fork_server is not None:
            with self.log_file.open("ab") as log:
                return self._fork_server.start(
                    _PROGRAM, [settings], environment=environment, output=log,
                    num_ranks=self._num_ranks if self._num_ranks > 1 else 0,
                )  # fmt: skip
        return start_child([sys.executable, *command], env=environment, log_file=self.log_file)

    def _accept(self) -> None:
        for _ in range(self._num_ranks):
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._hear, args=(connection,), name="loop-events", daemon=True
            ).start()

    def _hear(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                event = connection.recv()
                with self._told:
                    self._connections[event["rank"]] = connection
                    self.events.append(event)
                    if not self._record.closed:
                        self._record.write(json.dumps(event) + "\n")
                    self._told.notify_all()

    def command(self, command: str, **what: Any) -> None:
        """Sends a command to rank 0, which executes it before its next publish."""
        self._connections[0].send({"command": command, **what})

    def mark(self) -> int:
        return len(self.events)

    def wait_for(
        self,
        event: str | tuple[str, ...],
        since: int = 0,
        timeout_seconds: float = 240.0,
        holds: Callable[[Event], bool] = lambda event: True,
        **fields: Any,
    ) -> Event:
        """Returns the first event of this kind, or these, with these fields; fails if none comes."""
        kinds = (event,) if isinstance(event, str) else event

        def find() -> Event | None:
            for told in self.events[since:]:
                if told["event"] in kinds and fields.items() <= told.items() and holds(told):
                    return told
            return None

        deadline = time.monotonic() + timeout_seconds
        with self._told:
            while (found := find()) is None:
                left = deadline - time.monotonic()
                alive = self.process.poll() is None
                assert left > 0 and alive, (
                    f"No {event} {fields} came within {timeout_seconds:g} s"
                    f"{'' if alive else ': the loop has ended'}.\n{self.log_tail()}"
                )
                self._told.wait(min(left, 0.5))
        return found

    def of_kind(self, event: str, since: int = 0, **fields: Any) -> list[Event]:
        return [
            told
            for told in self.events[since:]
            if told["event"] == event and fields.items() <= told.items()
        ]

    def end(self, timeout_seconds: float = 240.0) -> Event:
        self.command("end")
        ended = self.wait_for("ended", rank=0, timeout_seconds=timeout_seconds)
        assert self.process.wait(20) == 0, self.log_tail()
        return ended

    def kill(self) -> None:
        """Kills the program, as the kernel does when memory runs out."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        stop_children([self.process], grace_seconds=0.5)
        self._listener.close()
        self._record.close()

    def log_tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:]


def processes_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def tcp_ports_of(pid: int) -> list[int]:
    ports = set()
    for process in processes_of(pid):
        with contextlib.suppress(psutil.Error):
            ports |= {c.laddr.port for c in process.net_connections("tcp") if c.laddr}
    return sorted(ports)
