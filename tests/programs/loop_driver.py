"""Starts `publishing_loop.py`, keeps the events that it reports, and ends it."""

import contextlib
import json
import os
import threading
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from forked import ForkServer

from torchtitan.grpo.system.child import stop_children

Event = dict[str, Any]


class PublishingLoop:
    """The program on several ranks, and this process's end of its socket."""

    def __init__(
        self, folder: Path, num_ranks: int, fork_server: ForkServer, **settings: Any
    ) -> None:
        folder.mkdir(parents=True)
        self.events: list[Event] = []
        self._leader: Connection | None = None
        # In a private folder of its own choice, since a Unix socket's path must be short.
        self._listener = Listener(family="AF_UNIX")
        self.log_file = folder / "loop.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with self.log_file.open("ab") as log:
            self.process: Any = fork_server.start(
                Path(__file__).with_name("publishing_loop.py"),
                [json.dumps({"socket": self._listener.address, **settings})],
                environment=environment, output=log, num_ranks=num_ranks,
            )  # fmt: skip
        for _ in range(num_ranks):
            threading.Thread(target=self._hear, name="loop-events", daemon=True).start()

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            connection = self._listener.accept()
            while True:
                event = connection.recv()
                if event["rank"] == 0:
                    self._leader = connection
                self.events.append(event)

    def end(self) -> None:
        assert self._leader is not None
        self._leader.send("end")
        assert self.process.wait(240) == 0, self.log_tail()

    def close(self) -> None:
        stop_children([self.process], grace_seconds=0.5)
        self._listener.close()

    def log_tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:]
