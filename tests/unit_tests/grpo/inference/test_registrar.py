# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``serve --register``: a server registers once it is up, and leaves when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.inference.registry import Registration, RegistryFolder

REPOSITORY = Path(__file__).resolve().parents[4]
MODEL = REPOSITORY / "assets/reverse_digits/model"
LIGHT = REPOSITORY / "torchtitan/grpo/system/light_start.py"
PATIENCE_SECONDS = 120.0
# Stands for the server: it answers every route.
SERVER = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)

    def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(LIGHT), "torchtitan.grpo.inference.serve", "embedded"]
        with (tmp_path / "serve.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(MODEL), "--device", "cpu", "--python", str(python), *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdout=log, stderr=log, cwd=tmp_path,
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)


def wait_for(folder: RegistryFolder, holds: Callable[[list[Registration]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(folder.read()):
        assert time.monotonic() < deadline, folder.read()
        time.sleep(0.05)


def test_a_server_is_in_the_folder_while_it_lives(serve, tmp_path: Path) -> None:
    folder = RegistryFolder(tmp_path / "registry")
    process = serve("--register", "registry", "--host", "127.0.0.1")
    wait_for(folder, lambda found: len(found) == 1 and found[0].beat >= 2)
    (one,) = folder.read()
    assert one.url.startswith("http://127.0.0.1:") and one.pid == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert folder.read() == []


def test_a_server_that_ends_by_itself_leaves_and_its_status_is_passed_on(
    serve, tmp_path: Path
) -> None:
    port = str(free_ports(1)[0])
    folder = RegistryFolder(tmp_path / "registry")
    process = serve("--register", "registry", "--host", "127.0.0.1", "--port", port)
    wait_for(folder, lambda found: len(found) == 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert process.wait(timeout=30) != 0
    assert folder.read() == []
