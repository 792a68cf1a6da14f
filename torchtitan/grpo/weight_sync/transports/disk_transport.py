# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends versions as safetensors files to servers that share a filesystem with the trainer.

Every source rank writes its part of a version into one directory (see
`weight_wire/version_files.py`). Each version is written once, however many servers read it.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.system.rank_calls import operation
from torchtitan.grpo.weight_sync.payloads import PayloadPool
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_sync.transports.interface import (
    Connection,
    NotPrepared,
    PushReport,
    Sender,
    Transport,
)
from torchtitan.grpo.weight_wire.version_files import VersionDirectories, write_part


class DiskSender(Sender):
    def __init__(self, rank: int, pool: PayloadPool, timeout_seconds: float) -> None:
        super().__init__(rank, pool)
        self._timeout_seconds = timeout_seconds
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="weight-write")

    @operation
    async def write(self, version: int, directory: str) -> None:
        with self.pool.reading(version) as payload:
            await payload.wait_filled(len(payload.buffers) - 1, self._timeout_seconds)
            write = functools.partial(self._write, version, Path(directory))
            await asyncio.get_running_loop().run_in_executor(self._writing, write)

    def _write(self, version: int, directory: Path) -> None:
        # The thread itself keeps the buffers, because it continues if its caller is cancelled.
        with self.pool.reading(version) as payload:
            buckets = [payload.bucket(index) for index in range(len(payload.buffers))]
            write_part(directory, self.rank, [(b.spec, b.payload) for b in buckets])

    async def close(self) -> None:
        self._writing.shutdown(wait=False, cancel_futures=True)


class DiskTransport(Transport[DiskSender]):
    """Sends versions as files. ``make_directories`` opens ``weight_sync.disk_path`` on rank 0; it may block."""

    sender_type = DiskSender

    def __init__(
        self,
        plan: PushPlan,
        make_directories: Callable[[], VersionDirectories],
        timeout_seconds: float,
    ) -> None:
        self._plan, self._make_directories = plan, make_directories
        self._timeout_seconds = timeout_seconds
        self._directories: VersionDirectories | None = None
        self._senders: Sequence[DiskSender] = ()
        self._writing: dict[int, asyncio.Task[Path]] = {}

    def describe(self) -> str:
        return "as files in weight_sync.disk_path"

    def make_sender(self, rank: int, pool: PayloadPool) -> DiskSender:
        return DiskSender(rank, pool, self._timeout_seconds)

    async def lead(self, senders: Sequence[DiskSender]) -> None:
        self._senders = senders
        self._directories = await asyncio.to_thread(self._make_directories)

    def connect(self, client: InferenceClient) -> "DiskConnection":
        return DiskConnection(client, self, self._timeout_seconds)

    async def written(self, version: int) -> tuple[Path, int]:
        """Returns the directory of a version, written if necessary, and its tensors' number of bytes.

        The first call writes the version for all servers. If that fails, for example because the
        disk is full, NotPrepared is raised, and the next call tries again.
        """
        task = self._writing.get(version)
        if task is None:
            task = asyncio.create_task(self._write(version), name=f"write-version-{version}")
            self._writing[version] = task
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.shield(task), self._plan.num_bytes
        except (OSError, RuntimeError) as error:
            late = f"it took longer than weight_sync.timeout_seconds = {self._timeout_seconds:g}"
            reason = str(error) or late  # a TimeoutError has no message
            raise NotPrepared(
                f"Version {version} could not be written to weight_sync.disk_path: {reason}"
            ) from error

    async def _write(self, version: int) -> Path:
        assert self._directories is not None, "lead() has not been called"
        try:
            partial = await asyncio.to_thread(self._directories.begin, version)
            writing = (sender.write(version, str(partial)) for sender in self._senders)
            # All writers are awaited even if one fails, because until they end they write into the
            # directory.
            for result in await asyncio.gather(*writing, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            return await asyncio.to_thread(self._directories.finish, version)
        except BaseException:
            self._writing.pop(version, None)
            self._directories.remove(version)
            raise

    async def forget(self, version: int) -> None:
        task = self._writing.pop(version, None)
        if task is not None and self._directories is not None:
            # The task is not cancelled, because work that has begun on the writers' threads cannot
            # be cancelled.
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self._directories.remove, version)


class DiskConnection(Connection):
    def __init__(
        self, client: InferenceClient, transport: DiskTransport, timeout_seconds: float
    ) -> None:
        super().__init__(client)
        self._transport, self._timeout_seconds = transport, timeout_seconds

    async def join(self) -> None:
        # A trainer that was killed earlier may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()

    async def prepare(self, version: int) -> None:
        await self._transport.written(version)

    async def push(self, version: int, base: int | None) -> PushReport:
        started = time.monotonic()
        path, num_bytes = await self._transport.written(version)
        written = time.monotonic()
        stops = self.client.capabilities.stops_for != "nothing"
        if stops:
            await self.client.pause()
        stood_still = await self._load(path, version)
        if stops:
            await self.client.resume()
            stood_still = time.monotonic() - written
        seconds = time.monotonic() - started
        return PushReport(version, num_bytes, seconds, seconds, stood_still)

    async def _load(self, path: Path, version: int) -> float:
        """Makes the server load the files; returns for how many seconds the server generated nothing."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self.client.update_from_disk(str(path), version)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.client.url} must load version {version} from weight_sync.disk_path within "
                f"weight_sync.timeout_seconds = {self._timeout_seconds:g}, but it has not "
                "answered. Check the server's log, or raise the setting."
            ) from error

    async def recover(self) -> None:
        await self.release_server(self._timeout_seconds)

    async def close(self) -> None:
        # The server may have been paused for an update that was interrupted.
        await self.release_server(self._timeout_seconds)
