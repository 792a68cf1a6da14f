# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sizes and checksums of files, in a folder beside them, and which files have changed since.

A folder holds any number of files ``sums_<name>.json``. Files that none of them names are not checked.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torchtitan.grpo.system.files import open_regular, read_regular

_READ_BYTES = 16 * 2**20

Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""


def write_sums(file: Path, sums: Sums) -> None:
    """Writes ``sums_<name>.json`` durably."""
    with file.open("w") as stream:
        stream.write(json.dumps(sums, allow_nan=False))
        stream.flush()
        os.fsync(stream.fileno())


def read_sums(folder: Path) -> Sums:
    """Returns all that the folder's files of checksums hold; raises ValueError if one is damaged."""
    sums: Sums = {}
    for file in sorted(folder.glob("sums_*.json")):
        try:
            found = json.loads(read_regular(file))
            sums |= {name: (int(size), int(crc)) for name, (size, crc) in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file.name} is damaged: {error}") from error
    return sums


def sums_of(files: Iterable[Path]) -> Sums:
    return {file.name: (file.stat().st_size, _crc_of(file)) for file in files}


def damaged_files(
    folder: Path,
    share: int = 0,
    num_shares: int = 1,
    *,
    is_wanted: Callable[[str, int], bool] = lambda name, size: True,
) -> Iterator[str]:
    """Yields the names of files in a folder whose contents are not what was written.

    Args:
        folder: A folder; without files of checksums it has no damaged ones.
        share: Index of the share of its files that is read, so that ranks can divide them.
        num_shares: Number of shares.
        is_wanted: Whether a file of this name, and of this size when it was written, is read.
    """
    try:
        sums = read_sums(folder)
    except ValueError as error:
        yield str(error)
        return
    wanted = sorted(name for name, (size, _) in sums.items() if is_wanted(name, size))
    for name in wanted[share::num_shares]:
        try:
            found = _crc_of(folder / name)
        except OSError as error:
            yield f"{name} ({error.strerror})"
            continue
        if found != sums[name][1]:
            yield name


def _crc_of(file: Path) -> int:
    crc = 0
    with open_regular(file) as stream:
        while data := stream.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc
