# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Versions sent as safetensors files, to servers that share a filesystem with the trainer.

    DISK_PATH/version-7.partial/   every source rank writes its part into it
    DISK_PATH/version-7/           the leader renames it once all parts are complete

Each version is written once, however many servers read it. A directory gets its final name
only when it is complete and on the disk. The checksums of all tensors lie in it, and the
servers that this project controls compare them.

DISK_PATH belongs to one run at a time, because the versions of two runs would have the same
names. The run holds a lock on it, which ends with its process.
"""

import asyncio
import fcntl
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.weight_sync.channel import operation
from torchtitan.grpo.weight_sync.payloads import Bucket, PayloadPool
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_sync.transports.interface import (
    Connection,
    NotPrepared,
    PushReport,
    Sender,
    Transport,
)
from torchtitan.grpo.weight_wire.buckets import CHECKSUMS_FILE, split_bucket
from torchtitan.grpo.weight_wire.checksum import tensor_checksum

logger = logging.getLogger(__name__)

# How long a predecessor that was killed may take to release the lock.
_LOCK_SECONDS = 15.0
_POLL_SECONDS = 0.1


class DiskSender(Sender):
    """Writes a source rank's buckets to files.

    Args:
        rank: Rank of the current process in the default process group.
        pool: The versions that this rank holds.
        num_buckets: Number of buckets that this rank has of each version.
        timeout_seconds: How long the last bucket of a version may take to be gathered.
    """

    def __init__(
        self, rank: int, pool: PayloadPool, num_buckets: int, timeout_seconds: float
    ) -> None:
        super().__init__(rank, pool)
        self._num_buckets, self._timeout_seconds = num_buckets, timeout_seconds
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="weight-write")

    @operation
    async def write(self, version: int, directory: str) -> None:
        """Writes this rank's part of a version into a directory."""
        with self.pool.reading(version) as payload:
            await payload.wait_filled(self._num_buckets - 1, self._timeout_seconds)
            write = functools.partial(self._write, version, Path(directory))
            await asyncio.get_running_loop().run_in_executor(self._writing, write)

    def _write(self, version: int, directory: Path) -> None:
        # The thread itself keeps the buffers: a caller that gives up does not stop it.
        with self.pool.reading(version) as payload:
            buckets = [payload.bucket(index) for index in range(self._num_buckets)]
            write_part(directory, self.rank, buckets)

    async def close(self) -> None:
        self._writing.shutdown(wait=False, cancel_futures=True)


def write_part(directory: Path, rank: int, buckets: Sequence[Bucket]) -> None:
    """Writes one source rank's part of a version: a safetensors file, and its checksums.

    Raises:
        OSError: If the disk is full or the directory cannot be written to.
    """
    tensors = {}
    for bucket in buckets:
        parts = split_bucket(bucket.payload.cpu(), bucket.spec)
        # Cloned, since safetensors refuses tensors that share memory.
        tensors |= {n: p.clone() for n, p in zip(bucket.spec.names, parts, strict=True)}
    file = directory / f"model-rank{rank:05d}.safetensors"
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # raised here only if the file could not be written
        raise OSError(f"Writing {file} failed: {error}. Is the disk full?") from error
    (directory / f"checksums-rank{rank:05d}.json").write_text(json.dumps(checksums))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


class DiskTransport(Transport[DiskSender]):
    """See the module's docstring.

    Args:
        plan: What each source rank sends.
        make_directories: Opens ``weight_sync.disk_path`` on rank 0, and may block there.
        timeout_seconds: How long writing a version, and loading it on a server, may take.
        payload_device: Device on which source ranks keep the buffers of a version.
    """

    sender_type = DiskSender

    def __init__(
        self,
        plan: PushPlan,
        make_directories: Callable[[], "VersionDirectories"],
        timeout_seconds: float,
        payload_device: torch.device,
    ) -> None:
        self._plan, self._make_directories = plan, make_directories
        self._timeout_seconds, self.payload_device = timeout_seconds, payload_device
        self._directories: VersionDirectories | None = None
        self._senders: Sequence[DiskSender] = ()
        self._writing: dict[int, asyncio.Task[Path]] = {}

    def describe(self) -> str:
        return "as files in weight_sync.disk_path"

    def make_sender(self, rank: int, pool: PayloadPool) -> DiskSender:
        source = self._plan.source(rank)
        assert source is not None, f"rank {rank} is not a source"
        return DiskSender(rank, pool, len(source.buckets), self._timeout_seconds)

    def lead(self, senders: Sequence[DiskSender]) -> None:
        self._senders, self._directories = senders, self._make_directories()

    def connect(self, client: InferenceClient) -> "DiskConnection":
        return DiskConnection(client, self, self._plan.selection.name, self._timeout_seconds)

    async def written(self, version: int) -> tuple[Path, int]:
        """Returns the directory of a version, and the number of bytes of its tensors.

        The first caller has the version written; others wait for the same files.

        Raises:
            NotPrepared: If the version could not be written, or not in time, for instance
                because the disk is full. The next caller tries again.
        """
        task = self._writing.get(version)
        if task is None:
            task = asyncio.create_task(self._write(version), name=f"write-version-{version}")
            self._writing[version] = task
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.shield(task), self._plan.num_bytes
        except (OSError, RuntimeError) as error:
            # A TimeoutError has no message of its own.
            late = f"it took longer than weight_sync.timeout_seconds = {self._timeout_seconds:g}"
            reason = str(error) or late
            raise NotPrepared(
                f"Version {version} could not be written to weight_sync.disk_path: {reason}"
            ) from error

    async def _write(self, version: int) -> Path:
        assert self._directories is not None, "lead() has not been called"
        try:
            partial = await asyncio.to_thread(self._directories.begin, version)
            writing = (sender.write(version, str(partial)) for sender in self._senders)
            # All are awaited, also when one fails: until then they write into the directory.
            for result in await asyncio.gather(*writing, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            return await asyncio.to_thread(self._directories.finish, version)
        except BaseException:
            self._writing.pop(version, None)
            self._directories.remove(version)
            raise

    async def forget(self, version: int) -> None:
        """Deletes the files of a version that no server is to read any more."""
        task = self._writing.pop(version, None)
        if task is not None and self._directories is not None:
            # Not cancelled, since what has begun on the writers' threads cannot be.
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self._directories.remove, version)

    def close(self) -> None:
        if self._directories is not None:
            self._directories.close()


class DiskConnection(Connection):
    """Makes one server load the files of a version.

    Args:
        client: The server.
        transport: Writes each version once, for all servers.
        selection: Name of the parameters that are pushed.
        timeout_seconds: How long the server may take to load a version.
    """

    def __init__(
        self,
        client: InferenceClient,
        transport: DiskTransport,
        selection: str,
        timeout_seconds: float,
    ) -> None:
        super().__init__(client)
        self._transport, self._selection = transport, selection
        self._timeout_seconds = timeout_seconds

    async def join(self) -> None:
        # A predecessor that was killed may have left an update open or the server paused.
        await self.client.leave_weight_groups()
        await self.client.resume()

    async def prepare(self, version: int) -> None:
        await self._transport.written(version)

    async def push(self, version: int, base: int | None) -> PushReport:
        started = time.monotonic()
        path, num_bytes = await self._transport.written(version)
        written = time.monotonic()
        stops = self.client.stops_for != "nothing"
        if stops:
            await self.client.pause()
        async with asyncio.timeout(self._timeout_seconds):
            stood_still = await self.client.update_from_disk(str(path), version)
        if stops:
            await self.client.resume()
            stood_still = time.monotonic() - written
        seconds = time.monotonic() - started
        return PushReport(version, self._selection, num_bytes, seconds, seconds, stood_still)

    async def recover(self) -> None:
        await self.release_server(self._timeout_seconds)

    async def close(self) -> None:
        # The server may have been paused for an update that was broken off.
        await self.release_server(self._timeout_seconds)


class VersionDirectories:
    """``weight_sync.disk_path`` as the leader sees it.

    Args:
        root: The directory; it is made if it does not exist.
        source: Directory of the trained model. Its config and tokenizer files are copied
            beside the weights, since a server may want them there.
        lock_seconds: How long another run may still hold the directory.

    Raises:
        ValueError: If another run holds the directory for longer.
    """

    def __init__(self, root: Path, source: Path, lock_seconds: float = _LOCK_SECONDS) -> None:
        self._root, self._source = root, source
        root.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _locked(root, lock_seconds)
        # What a killed predecessor left is useless: half written, or of another run.
        for left in root.glob("version-*"):
            if left.suffix == ".partial" or (left / CHECKSUMS_FILE).is_file():
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, version: int) -> Path:
        """Makes an empty directory for the parts of a version."""
        partial = self._root / f"version-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def finish(self, version: int) -> Path:
        """Joins the checksums, adds the model's config, and gives the directory its name."""
        partial = self._root / f"version-{version}.partial"
        checksums: dict[str, int] = {}
        for part in sorted(partial.glob("checksums-rank*.json")):
            checksums |= json.loads(part.read_text())
            part.unlink()
        (partial / CHECKSUMS_FILE).write_text(json.dumps(checksums))
        for file in self._source.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, partial / file.name)
        target = self._root / f"version-{version}"
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return target

    def remove(self, version: int) -> None:
        """Deletes whatever exists of a version."""
        for name in (f"version-{version}", f"version-{version}.partial"):
            shutil.rmtree(self._root / name, ignore_errors=True)

    def close(self) -> None:
        """Releases the directory to other runs. What is served now stays there. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(root: Path, timeout_seconds: float) -> int:
    """Returns a handle of the directory, locked against other runs until it is closed."""
    handle = os.open(root, os.O_RDONLY)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(handle)
                raise ValueError(
                    f"weight_sync.disk_path must be used by one run at a time, and another run has "
                    f"held {root} for {timeout_seconds:g} s. Give each run a directory of its own."
                ) from error
        except OSError as error:  # a filesystem without locks
            logger.warning("%s cannot be locked (%s): no other run may use it.", root, error)
            return handle
        time.sleep(_POLL_SECONDS)
