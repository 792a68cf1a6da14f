# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tests' end of `fork_server.py`: starts processes that need not import torch first."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.grpo.inference.kinds import ServerSpec
    from torchtitan.grpo.inference.local_servers import LaunchedServer

_PROGRAM = Path(__file__).with_name("fork_server.py")
_START_SECONDS = 300.0
# Names the folder of a server that a process above this one has begun.
SHARED = "GRPO_TEST_FORK_SERVER"

# An interpreter for `inference.python`: it takes the command line of a launched embedded
# server, has the fork server start it, and stands for it. Signals are passed on, but for
# SIGSTOP and SIGCONT; where it is killed, the server is killed.
_LAUNCHER = """#!{python} -IS
import os, signal, sys
sys.path.append({folder!r})
import forked

_light_start, module, *arguments = sys.argv[1:]
process = forked.connect({address!r}, forked.job(module, arguments), 1, 2)
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda signum, frame: process.send_signal(signum))
status = process.wait()
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ForkedProcess:
    """A process of the fork server, with the surface of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._heard = connection, b""
        self.returncode: int | None = None
        message = self._message(_START_SECONDS)
        assert message is not None, "the fork server did not answer"
        self.pid: int = message["pid"]

    def _message(self, timeout_seconds: float | None) -> dict[str, int] | None:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                return None
            part = b""
            with contextlib.suppress(ConnectionResetError):
                part = self._connection.recv(4096)
            if not part:
                raise RuntimeError("The fork server has ended.")
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            message = self._message(timeout)
            if message is None:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = message["status"]
            self._connection.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server, which is started with its first process, or the one whose folder `SHARED` names."""

    def __init__(self) -> None:
        shared = os.environ.get(SHARED)
        self._is_others = shared is not None
        self.folder = Path(shared or tempfile.mkdtemp(prefix="fork-server-"))
        self._address = str(self.folder / "socket")
        self._python = self.folder / "python"
        self._control: socket.socket | None = None

    def begin(self) -> None:
        """Starts the server, which then imports while the caller goes on."""
        if self._is_others or self._control is not None:
            return
        self._control, control = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener, control:
            listener.bind(self._address)
            listener.listen(64)
            sockets = (listener.fileno(), control.fileno())
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "",
                "MPLBACKEND": "agg",
                # pyarrow's own allocator would start a thread.
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            }  # fmt: skip
            with (self.folder / "log").open("w") as log:
                subprocess.run(
                    [sys.executable, str(_PROGRAM), *map(str, sockets)],
                    env=environment, pass_fds=sockets, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, check=True, timeout=_START_SECONDS,
                )  # fmt: skip
        launcher = _LAUNCHER.format(
            python=sys.executable, folder=str(Path(__file__).parent), address=self._address
        )
        self._python.write_text(launcher)
        self._python.chmod(0o755)

    def start(
        self,
        program: str | Path,
        arguments: Sequence[str] = (),
        *,
        num_ranks: int = 0,
        environment: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        output: IO[Any] | None = None,
        errors: IO[Any] | None = None,
    ) -> ForkedProcess:
        self.begin()
        file = sys.stdout.fileno() if output is None else output.fileno()
        error_file = file if errors is None else errors.fileno()
        what = job(program, arguments, num_ranks, environment, folder)
        try:
            return connect(self._address, what, file, error_file)
        except RuntimeError as error:
            raise RuntimeError((self.folder / "log").read_text()[-4000:]) from error

    def launcher(self) -> str:
        """An executable for `inference.python`: embedded servers start by a fork."""
        self.begin()
        return str(self._python)

    def start_server(self, spec: "ServerSpec", log_file: Path) -> "LaunchedServer":
        from torchtitan.grpo.inference import local_servers

        if spec.kind != "embedded":
            return local_servers.start_server(spec, log_file)
        (_python, _light_start, module, *arguments), environment = local_servers.server_command(
            spec, os.environ
        )
        with log_file.open("ab") as log:
            process: Any = self.start(
                module, arguments, environment=environment, folder=log_file.parent, output=log
            )
        return local_servers.LaunchedServer(spec, process, log_file)

    def close(self) -> None:
        if self._is_others:
            return
        if self._control is not None:
            self._control.close()
        shutil.rmtree(self.folder)


def job(
    program: str | Path,
    arguments: Sequence[str],
    num_ranks: int = 0,
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    return {
        "module": program if isinstance(program, str) else None,
        "script": None if isinstance(program, str) else str(program),
        "arguments": list(arguments),
        "num_ranks": num_ranks,
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or Path.cwd()),
    }


def connect(address: str, what: dict[str, Any], *files: int) -> ForkedProcess:
    body = json.dumps(what).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
    connection.sendall(body)
    return ForkedProcess(connection)
