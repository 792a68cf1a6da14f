# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One worker process, what it may see and use, and the owner's end of its pipe.

User code must not come upon the trainer's keys by accident, such as in a log of ``os.environ``. This is
no sandbox: a worker runs as the same user, who can read that user's files and processes.
"""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from torchtitan.grpo.config import Workers
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.child import child_command
from torchtitan.grpo.system.environment import RUN_VARIABLE, is_named
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.workers.channel import HEADER, pack_frame

Reply = TypeVar("Reply")

# Everything that a program needs to run and to find files, and nothing that grants access.
_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*",
    "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED",
    "PYTHONWARNINGS", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
    "*_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE", "NLTK_DATA",
)  # fmt: skip

# A process that closed its pipe is given this long to exit, so that its exit code is known.
_EXIT_SECONDS = 1.0


def worker_environment(also: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables that user code sees: harmless ones and those that ``also`` names."""
    names = *_PASSED, RUN_VARIABLE, spans.VARIABLE, *also
    return {name: value for name, value in os.environ.items() if is_named(name, names)}


def limits_of(workers: Workers) -> dict[int, tuple[int, int]]:
    """The soft and the hard limit of each resource."""
    limits = {}
    if workers.max_memory_gib:
        num_bytes = int(workers.max_memory_gib * 2**30)
        limits[resource.RLIMIT_AS] = num_bytes, num_bytes
    return limits


class WorkerLost(Exception):
    """The worker process ended before it replied. ``exit_code`` is set if it ended by itself."""

    exit_code: int | None = None


class WorkerKilled(WorkerLost):
    """The owner has killed the worker process."""


class ChannelBroken(WorkerLost):
    """The worker process was killed because what it sent was not a reply."""


class WorkerProcess(Generic[Reply]):
    """A child process that answers requests, any number of them at a time.

    ``module`` runs as ``__main__`` and must create a `WorkerChannel`. When the process has ended,
    ``on_end`` is called once with the reason, and all pending and later calls raise this reason.
    """

    def __init__(
        self,
        module: str,
        decode: Callable[[bytes], Reply],
        on_end: Callable[[WorkerLost], None],
        workers: Workers,
    ) -> None:
        self._workers = workers
        self._module, self._decode, self._on_end = module, decode, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._reason: WorkerLost | None = None

    @property
    def is_lost(self) -> bool:
        return self._reason is not None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *child_command(
                [*LIGHT_PYTHON, self._module],
                signum=signal.SIGKILL,
                limits=limits_of(self._workers),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=worker_environment(self._workers.pass_variables),
        )
        if self.is_lost:  # killed while it was being started
            await self._stop_process()
            return
        self._reader = asyncio.create_task(self._read(self._process))

    async def call(self, request: Any) -> Reply:
        """Sends a request and returns its reply, which is dropped if the caller is cancelled.

        Raises NotPlainData if the request cannot be encoded. The process has then not seen it.
        """
        process = self._process
        if self._reason is not None or process is None or process.stdin is None:
            raise self._lost()
        number, self._num_calls = self._num_calls, self._num_calls + 1
        frame = pack_frame(number, request)
        reply = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            # An error of the pipe also ends the reader, which knows how the process ended.
            with contextlib.suppress(ConnectionError):
                process.stdin.write(frame)
                await process.stdin.drain()
            return await reply
        finally:
            del self._pending[number]

    async def call_or_kill(self, request: Any, timeout_seconds: float) -> Reply:
        """Like :meth:`call`, but kills the process at the time limit, with a TimeoutError.

        The process is also killed if the caller is cancelled, because it would stay busy for nobody.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self.call(request)
        except (TimeoutError, asyncio.CancelledError):
            await self.kill()
            raise

    async def kill(self) -> None:
        """Kills the process together with everything in its session."""
        await self._end(WorkerKilled("The worker process was killed."))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "the process was started with a pipe"
        try:
            while True:
                length, number = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
                if number >= self._num_calls:
                    raise msgspec.DecodeError(f"it answers call {number}, which was never made")
                reply = self._decode(await process.stdout.readexactly(length))
                waiting = self._pending.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await process.wait()
            code = process.returncode
            how = "closed its pipe" if code is None else f"ended with exit code {code}"
            lost = WorkerLost(f"The worker process {how}.")
            lost.exit_code = code
            await self._end(lost)
        except msgspec.DecodeError as error:
            await self._end(ChannelBroken(f"A reply of the worker process is not valid: {error}."))

    async def _end(self, reason: WorkerLost) -> None:
        """Kills the process, then fails the pending calls with the first reason given."""
        is_first = self._reason is None
        self._reason = self._reason or reason
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        try:
            await self._stop_process()
        finally:
            for waiting in self._pending.values():
                if not waiting.done():
                    waiting.set_exception(self._lost())
            if is_first:
                self._on_end(self._reason)

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _lost(self) -> WorkerLost:
        """Makes a new exception for each caller, since a shared one would collect tracebacks."""
        if self._reason is None:
            return WorkerLost("The worker process was not started.")
        lost = type(self._reason)(str(self._reason))
        lost.exit_code = self._reason.exit_code
        return lost
