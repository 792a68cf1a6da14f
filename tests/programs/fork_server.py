# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forks the processes that tests need from one process that has imported everything already.

    python fork_server.py LISTENING_SOCKET CONTROL_SOCKET        (file descriptors)

Importing torch, torchtitan and transformers takes six seconds of one core, and a training run
has three processes that do so. This process imports them once, starts no thread, no process
group and no device, and forks: a single process, or several ranks below an agent that does
what torchrun's does. A forked process has a session, an environment, a working directory and
output files of its own, and runs its module or script as ``__main__``. Its tests see the same
program as after an exec, with these exceptions: /proc shows the command line and the
environment of this process, and all ranks of a run share one seed for the hashes of strings.

The client is `forked.py`. A client's connection stands for its process: the exit status is
sent over it, and where the client closes it first, the process is killed. This process ends,
and kills what it has forked, when the control socket is closed.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

# Longest time that the other ranks have to end after one has failed, as under torchrun.
_GRACE_SECONDS = 30
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.testing",
    "torch.utils.tensorboard",
    "typeguard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torchtitan.grpo.inference.embedded.__main__",
    "torchtitan.grpo_train",
)

Job = dict[str, Any]
"""What to run; see `ForkServer.start` in `forked.py`."""


def preload() -> None:
    from torchtitan.grpo.system.device import settle_device

    assert settle_device() == "cpu", "CUDA does not survive a fork"
    for module in _PRELOADED:
        importlib.import_module(module)
    # They are to be run as __main__, which must not find them imported.
    del sys.modules["torchtitan.grpo_train"]
    del sys.modules["torchtitan.grpo.inference.embedded.__main__"]


def main() -> None:
    listener, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    # Nobody's child: tests look for processes that are left below their own.
    if os.fork():
        os._exit(0)
    os.setsid()
    preload()
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads would not survive a fork"
    gc.collect()
    gc.freeze()
    Server(listener, control).run()


class Server:
    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
        self._listener, self._control = listener, control
        self._connections: dict[int, socket.socket] = {}
        """By process id."""
        self._wake, wake_write = socket.socketpair()
        for end in (self._wake, wake_write):
            end.setblocking(False)
        self._sockets = [listener, control, self._wake, wake_write]
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno())

    def run(self) -> None:
        while True:
            pids = {connection: pid for pid, connection in self._connections.items()}
            waited = [self._listener, self._control, self._wake, *pids]
            readable, _, _ = select.select(waited, [], [])
            if self._control in readable:
                for pid in self._connections:
                    _kill_session(pid)
                os._exit(0)
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
            for connection in readable:
                # A client sends nothing more: it has gone.
                if connection in pids:
                    _kill_session(pids[connection])
                    self._connections.pop(pids[connection]).close()
            self._reap()
            if self._listener in readable:
                self._accept()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                connection = self._connections.pop(pid, None)
                if connection is not None:
                    _send(connection, {"status": os.waitstatus_to_exitcode(status)})
                    connection.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            job, files = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (*self._sockets, *self._connections.values(), connection):
                end.close()
            os.setsid()
            _settle(job, files)
            _run_ranks(job) if job["num_ranks"] else _run(job)
        for file in files:
            os.close(file)
        self._connections[pid] = connection
        _send(connection, {"pid": pid})


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> tuple[Job, list[int]]:
    """A job, and the files for its output: 8 bytes of length with the files, then JSON."""
    head, files, _, _ = socket.recv_fds(connection, 8, 2)
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            raise ValueError("The connection ended within a job.")
        body += part
    return json.loads(body), files


def _kill_session(leader: int) -> None:
    # A process that was just forked leads no session yet.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _settle(job: Job, files: list[int]) -> None:
    _die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    for target, file in enumerate((null, *files)):
        os.dup2(file, target)
    for file in (null, *files):
        os.close(file)
    os.environ.clear()
    # Torchtitan has settled on the CPU in this process.
    os.environ.update(job["environment"] | {"CUDA_VISIBLE_DEVICES": ""})
    os.chdir(job["folder"])
    script = job["script"]
    sys.path[0] = str(Path(script).parent) if script else job["folder"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [script or job["module"], *job["arguments"]]


def _run(job: Job) -> None:
    import numpy as np

    # Python's own random generator is seeded again after each fork.
    np.random.seed()
    status: Any = 0
    try:
        if job["script"]:
            runpy.run_path(job["script"], run_name="__main__")
        else:
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(status or 0))


def _run_ranks(job: Job) -> None:
    """Does what torchrun does on one node: starts the ranks, serves their store, and ends all
    of them where one fails. Ends the process."""
    world = job["num_ranks"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        agent = Agent([_fork_rank(job, rank, world, port, listener) for rank in range(world)])
        from torch.distributed import TCPStore

        # It starts threads: only now, after the last fork.
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    status = agent.wait()
    del store
    os._exit(status)


def _fork_rank(job: Job, rank: int, world: int, port: int, listener: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    listener.close()
    _die_with_parent()
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    os.environ.update({name: str(rank) for name in names})
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ.update({name: str(world) for name in names})
    os.environ.update(
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="forked", TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    _run(job)
    raise AssertionError("unreachable")


class Agent:
    def __init__(self, ranks: list[int]) -> None:
        self._ranks, self._alive = ranks, set(ranks)
        self._signum, self._has_failed = 0, False
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._pass_on)
        signal.signal(signal.SIGALRM, lambda *_: self._signal_all(signal.SIGKILL))

    def wait(self) -> int:
        while self._alive:
            pid, status = os.wait()
            self._alive.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not self._has_failed:
                self._has_failed = True
                now = time.strftime("%m%d %H:%M:%S")
                rank = self._ranks.index(pid)
                print(f"E{now} rank {rank} (pid {pid}) ended with {code}", file=sys.stderr)
                self._end_all(signal.SIGTERM)
        if self._signum:
            return 128 + self._signum
        return int(self._has_failed)

    def _pass_on(self, signum: int, frame: object) -> None:
        self._signum = signum
        self._end_all(signum)

    def _end_all(self, signum: int) -> None:
        self._signal_all(signum)
        signal.alarm(_GRACE_SECONDS)

    def _signal_all(self, signum: int) -> None:
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


if __name__ == "__main__":
    main()
