# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``serve --register``: a server registers once it is up, and leaves when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_kinds import held_port

from torchtitan.grpo.inference.registry import RegistryFolder

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


@contextmanager
def serve(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    python = folder / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    command = [sys.executable, str(LIGHT), "torchtitan.grpo.inference.serve"]
    command += ["embedded", str(MODEL)]
    command += ["--device", "cpu", "--python", str(python), "--register", "registry"]
    command += ["--host", "127.0.0.1", "--port", str(held_port())]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)


@pytest.mark.parametrize("ends_itself", [False, True])
def test_a_server_is_in_the_folder_while_it_lives_and_its_status_is_passed_on(
    tmp_path: Path, ends_itself: bool
) -> None:
    folder, deadline = RegistryFolder(tmp_path / "registry"), time.monotonic() + PATIENCE_SECONDS
    with serve(tmp_path) as process:
        while not (found := folder.read()) or found[0].beat < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (one,) = found
        assert one.url.startswith("http://127.0.0.1:") and one.pid == process.pid
        if ends_itself:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        assert (process.wait(timeout=30) != 0) == ends_itself
        assert folder.read() == []
