# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Versions as directories of safetensors files, as the trainer writes and servers read them.

    DISK_PATH/version-7.partial/   every source rank writes its part into it
    DISK_PATH/version-7/           the leader renames it once all parts are complete

A directory gets its final name only when it is complete and on the disk. Servers that this
project controls compare the checksums in it. DISK_PATH belongs to one run at a time, because the
versions of two runs would have the same names. The run locks the path (`run_folder/folder.py`).
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchtitan.grpo.weight_wire.buckets import split_bucket
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

CHECKSUMS_FILE = "checksums.json"
"""``{tensor name: checksum}`` beside the safetensors files of a pushed version."""


def write_part(
    directory: Path, rank: int, buckets: Sequence[tuple[BucketSpec, torch.Tensor]]
) -> None:
    """Writes a source rank's part of a version: a safetensors file, and its checksums."""
    tensors = {}
    for spec, payload in buckets:
        parts = split_bucket(payload.cpu(), spec)
        # Cloned, since safetensors refuses tensors that share memory.
        tensors |= {n: p.clone() for n, p in zip(spec.names, parts, strict=True)}
    file = directory / f"model-rank{rank:05d}.safetensors"
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # raised here only if the file could not be written
        raise OSError(f"Writing {file} failed: {error}. Is the disk full?") from error
    (directory / f"checksums-rank{rank:05d}.json").write_text(
        json.dumps(checksums, allow_nan=False)
    )
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


class VersionDirectories:
    """Makes and removes the directories of versions below ``weight_sync.disk_path``, on rank 0.

    The config and tokenizer files of ``source``, the trained model, are copied into each directory, because
    servers may need them.
    """

    def __init__(self, root: Path, source: Path) -> None:
        self._root, self._source = root, source
        root.mkdir(parents=True, exist_ok=True)
        # The versions of a predecessor that was killed are of no use: they are incomplete, or
        # belong to another run.
        for left in root.glob("version-*"):
            if left.suffix == ".partial" or (left / CHECKSUMS_FILE).is_file():
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, version: int) -> Path:
        partial = self._root / f"version-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def finish(self, version: int) -> Path:
        """Completes the directory of a version, once all source ranks have written their parts."""
        partial = self._root / f"version-{version}.partial"
        checksums: dict[str, int] = {}
        for part in sorted(partial.glob("checksums-rank*.json")):
            checksums |= json.loads(part.read_text())
            part.unlink()
        (partial / CHECKSUMS_FILE).write_text(json.dumps(checksums, allow_nan=False))
        for file in self._source.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, partial / file.name)
        target = self._root / f"version-{version}"
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return target

    def remove(self, version: int) -> None:
        for name in (f"version-{version}", f"version-{version}.partial"):
            shutil.rmtree(self._root / name, ignore_errors=True)


def read_weights(folder: str) -> dict[str, torch.Tensor]:
    """Reads all weights. Raises ValueError if there are none, or they contradict ``checksums.json``."""
    stored, tensors = WeightFiles(Path(folder), "model_path").headers(), {}
    for file in dict.fromkeys(one.file for one in stored.values()):
        try:
            with safe_open(file, framework="pt") as opened:
                # Cloned: a mapped tensor would change, or fail, with the file while it is served.
                tensors |= {
                    name: opened.get_tensor(name).clone()
                    for name, one in stored.items()
                    if one.file == file
                }
        except SafetensorError as error:
            raise ValueError(f"{file} must be a whole safetensors file: {error}") from error
    _compare_checksums(Path(folder) / CHECKSUMS_FILE, tensors)
    return tensors


def _compare_checksums(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    if not file.is_file():
        return
    expected = json.loads(file.read_text())
    if expected.keys() != tensors.keys():
        different = sorted(expected.keys() ^ tensors.keys())
        raise ValueError(f"{file} must name exactly the tensors beside it; {different[:3]} differ.")
    for name, tensor in tensors.items():
        if (found := tensor_checksum(tensor)) != expected[name]:
            raise ValueError(
                f"{name} must have checksum {expected[name]} according to {file}, got {found}."
            )
