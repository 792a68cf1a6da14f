# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Versions as safetensors files, for servers that share a filesystem with the trainer.

    DISK_PATH/version-7.partial/   each source writes its part into it
    DISK_PATH/version-7/           renamed by the leader once all parts are whole

A directory appears under its name only when it is complete and on the disk, with the
checksums of all tensors beside them, which a server of this project's own compares.

DISK_PATH belongs to one run at a time: another's versions have the same names. The run holds a
lock on it, which ends with its process.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from torchtitan.grpo.weight_sync.payloads import Bucket
from torchtitan.grpo.weight_wire.buckets import CHECKSUMS_FILE, split_bucket
from torchtitan.grpo.weight_wire.checksum import tensor_checksum

logger = logging.getLogger(__name__)

# A predecessor that was killed may take this long to be gone.
_LOCK_SECONDS = 15.0
_POLL_SECONDS = 0.1


def write_part(directory: Path, rank: int, buckets: Sequence[Bucket]) -> None:
    """Writes one source's share: a safetensors file, and its checksums.

    Raises:
        OSError: The disk is full, or the directory cannot be written to.
    """
    tensors = {}
    for bucket in buckets:
        parts = split_bucket(bucket.payload.cpu(), bucket.spec)
        # Cloned: safetensors takes no tensors that share memory.
        tensors |= {n: p.clone() for n, p in zip(bucket.spec.names, parts, strict=True)}
    file = directory / f"model-rank{rank:05d}.safetensors"
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the file could not be written: nothing else is wrong
        raise OSError(f"Writing {file} failed: {error}. Is the disk full?") from error
    (directory / f"checksums-rank{rank:05d}.json").write_text(json.dumps(checksums))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


class VersionDirectories:
    """The leader's view of ``weight_sync.disk_path``.

    Args:
        root: The directory; made where it does not exist.
        source: The trained model's directory, whose config and tokenizer files a server
            may want beside the weights.
        lock_seconds: How long another run may still hold the directory.

    Raises:
        ValueError: It holds it for longer.
    """

    def __init__(self, root: Path, source: Path, lock_seconds: float = _LOCK_SECONDS) -> None:
        self._root, self._source = root, source
        root.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _locked(root, lock_seconds)
        # A killed predecessor's are nobody's: half written, or of another run.
        for left in root.glob("version-*"):
            if left.suffix == ".partial" or (left / CHECKSUMS_FILE).is_file():
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, version: int) -> Path:
        """An empty directory for the parts of a version."""
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
        """Deletes what there is of a version."""
        for name in (f"version-{version}", f"version-{version}.partial"):
            shutil.rmtree(self._root / name, ignore_errors=True)

    def close(self) -> None:
        """Lets another run have the directory. What is served now stays there. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(root: Path, timeout_seconds: float) -> int:
    """A handle of the directory, locked against other runs until it is closed."""
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
                    f"weight_sync.disk_path must be of this run alone, and another one has held "
                    f"{root} for {timeout_seconds:g} s. Give each run a directory of its own."
                ) from error
        except OSError as error:  # a filesystem without locks
            logger.warning("%s cannot be locked (%s): let no other run use it.", root, error)
            return handle
        time.sleep(_POLL_SECONDS)
