# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each version written to disk once, by all sources, however many servers read it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from torchtitan.grpo.weight_sync.agent import Agent
from torchtitan.grpo.weight_sync.disk import VersionDirectories


class VersionNotWritten(RuntimeError):
    """A version is not on the disk; no server has been asked for anything."""


class DiskVersions:
    """See the module's docstring. Belongs to the leader's event loop.

    Args:
        directories: Where versions lie.
        agents: Of all source ranks.
        num_bytes: Of one version.
    """

    def __init__(
        self, directories: VersionDirectories, agents: Sequence[Agent], num_bytes: int
    ) -> None:
        self._directories, self._agents, self._num_bytes = directories, agents, num_bytes
        self._writing: dict[int, asyncio.Task[Path]] = {}

    async def written(self, version: int, timeout_seconds: float) -> tuple[Path, int]:
        """The directory of a version, and the bytes of its tensors.

        Raises:
            VersionNotWritten: It could not be, or not in time: the disk is full, for
                instance. The next caller tries again.
        """
        task = self._writing.get(version)
        if task is None:
            task = asyncio.create_task(self._write(version), name=f"write-version-{version}")
            self._writing[version] = task
        try:
            async with asyncio.timeout(timeout_seconds):
                return await asyncio.shield(task), self._num_bytes
        except (OSError, RuntimeError) as error:
            # A time that is up says nothing itself.
            late = f"it took longer than weight_sync.timeout_seconds = {timeout_seconds:g}"
            reason = str(error) or late
            raise VersionNotWritten(
                f"Version {version} could not be written to weight_sync.disk_path: {reason}"
            ) from error

    async def _write(self, version: int) -> Path:
        try:
            partial = await asyncio.to_thread(self._directories.begin, version)
            writing = (agent.write(version, str(partial)) for agent in self._agents)
            # To the end, also when one fails: the directory belongs to them until then.
            for result in await asyncio.gather(*writing, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            return await asyncio.to_thread(self._directories.finish, version)
        except BaseException:
            self._writing.pop(version, None)
            self._directories.remove(version)
            raise

    async def remove(self, version: int) -> None:
        """Deletes a version that nobody is to read any more."""
        task = self._writing.pop(version, None)
        if task is not None:
            # Not cancelled: what has begun on the writers' threads could not be.
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self._directories.remove, version)

    def close(self) -> None:
        """Lets another run have the directory."""
        self._directories.close()
