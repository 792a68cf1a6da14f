# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records batches of rollouts in a file, from which a run can train on them again.

The file consists of blocks: a header, then one block for each batch, in the order of training. They are
encoded without loss, like batches that the rollout process sends (`rollout/codec.py`)::

    8 bytes   size of the msgpack part        4 bytes   CRC-32 of both parts
    8 bytes   size of the arrays              4 bytes   CRC-32 of these 20 bytes
    both parts; integers are little-endian

In ``.gz`` files each block is a separate gzip member: a run that ends at any time leaves complete
blocks. ``torchtitan-grpo show FILE`` prints a record as JSON lines.
"""

import gzip
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from torchtitan.grpo.rollout.codec import Packed, pack, unpack
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.files import check_regular, open_regular
from torchtitan.grpo.types import PromptProgress, RolloutGroup

FORMAT = "torchtitan-grpo-rollouts"
FORMAT_VERSION = 5
_SIZES, _SUM = struct.Struct("<QQI"), struct.Struct("<I")


class RecordHeader(msgspec.Struct):
    format: str
    format_version: int
    vocab_size: int
    temperature: float


@dataclass(frozen=True)
class BatchRecord:
    """One batch, on which policy ``version`` was trained; ``progress`` includes its prompts."""

    version: int
    progress: PromptProgress
    groups: Sequence[RolloutGroup]


class RolloutRecorder:
    """Appends each batch to ``rollout.record`` before it is trained on.

    A run that resumes after ``version`` batches removes later ones from the file, because it generates them
    again. Raises :class:`DataError` if a new run would overwrite batches, if the file cannot be written, or
    if the file lacks batches that a resumed run has trained on.
    """

    def __init__(self, path: str, vocab_size: int, temperature: float, version: int) -> None:
        self._path = Path(path)
        self._header = RecordHeader(FORMAT, FORMAT_VERSION, vocab_size, temperature)
        # A run that ended before its first batch has left nothing to keep.
        is_empty = self._path.is_file() and not self._path.stat().st_size
        kept = self._batches() if self._path.exists() and not is_empty else iter(())
        if version == 0 and next(kept, None) is not None:
            raise DataError(
                f"rollout.record must name a file without batches, got {path}: a new run would "
                "overwrite its batches. Remove the file, or name another one."
            )
        if version > 0:
            kept = self._batches_before(version, kept)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(kept)
            # Unbuffered, so that a block that found no room is not written again at the end.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise DataError(f"rollout.record: {path} cannot be written: {error}.") from error

    def write(self, version: int, progress: PromptProgress, groups: Sequence[RolloutGroup]) -> None:
        block = self._block(BatchRecord(version, progress, groups))
        while block:
            block = block[self._file.write(block) :]

    def close(self) -> None:
        self._file.close()

    def _batches(self) -> Iterator[BatchRecord]:
        header = self._header
        reader = RecordReader(
            str(self._path), header.vocab_size, header.temperature, "rollout.record"
        )
        return (batch for _, batch in reader)

    def _batches_before(
        self, version: int, batches: Iterator[BatchRecord]
    ) -> Iterator[BatchRecord]:
        found = [batch.version for batch in batches if batch.version < version]
        if found != list(range(version)):
            raise DataError(
                f"rollout.record: {self._path} must hold the {version} batches that this resumed "
                f"run was trained on, got {len(found)} of them. A record begins with the first "
                "batch of a run, because a replay takes the batches in order. Name the file that "
                "the run has written so far, or leave out rollout.record."
            )
        return (batch for batch in self._batches() if batch.version < version)

    def _begin(self, kept: Iterable[BatchRecord]) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            with partial.open("wb") as file:
                file.write(self._block(self._header))
                for batch in kept:
                    file.write(self._block(batch))
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _block(self, record: RecordHeader | BatchRecord) -> bytes:
        if isinstance(record, BatchRecord):  # what was left out is for logs
            record = replace(record, groups=[replace(g, left_out=()) for g in record.groups])
        packed = pack(record)
        header, arrays = bytes(packed.header), packed.arrays
        sizes = _SIZES.pack(len(header), len(arrays), zlib.crc32(arrays, zlib.crc32(header)))
        block = b"".join((sizes, _SUM.pack(zlib.crc32(sizes)), header, arrays))
        return gzip.compress(block, compresslevel=1, mtime=0) if _is_gzip(self._path) else block


class RecordReader:
    """Iterates over the batches of a file as (where, record), with one batch in memory at a time.

    Each iteration reads the file from its beginning, and raises :class:`DataError` if the file cannot be
    used. A run that is killed while writing leaves an incomplete last block. The reader skips this block,
    because the run has not trained on it, and sets ``was_cut_off``. ``header`` is set once it is read. If
    ``vocab_size`` or ``temperature`` is None, any value in the file is accepted.
    """

    def __init__(
        self, path: str, vocab_size: int | None, temperature: float | None, key: str
    ) -> None:
        self._path, self._key = path, key
        self._vocab_size, self._temperature = vocab_size, temperature
        self.was_cut_off = False
        self.header: RecordHeader | None = None

    def __iter__(self) -> Iterator[tuple[str, BatchRecord]]:
        self.was_cut_off, self.header = False, None
        for number, packed in enumerate(self._blocks()):
            try:
                block = unpack(packed, BatchRecord if number else RecordHeader)
            except (ValueError, LookupError, TypeError) as error:
                raise self._error(f"block {number} cannot be decoded: {error}.") from error
            if isinstance(block, BatchRecord):
                yield f"{self._key}: {self._path}, batch {number}", block
            else:
                self._check_header(block)
                self.header = block
        if self.header is None:
            raise self._error("it is empty: it has no header.")

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self._key}: {self._path}: {problem}")

    def _blocks(self) -> Iterator[Packed]:
        try:
            with self._open() as file:
                while beginning := file.read(_SIZES.size + _SUM.size):
                    packed = self._content(file, beginning)
                    if packed is None:
                        self.was_cut_off = True
                        return
                    yield packed
        except EOFError:  # a gzip member that was cut off
            self.was_cut_off = True
        except (OSError, zlib.error) as error:
            raise self._error(f"it cannot be read: {error}.") from error

    def _content(self, file: BinaryIO, beginning: bytes) -> Packed | None:
        """Returns the content of a block; None if it is incomplete."""
        if self.header is None and beginning.startswith(b"{"):
            raise self._error(
                f"it must be a record of format {FORMAT_VERSION}, but it begins as the JSON lines of "
                "formats up to 4. Replay it with the commit that has written it (environment.json in "
                "the folder starts of its run names it), or record again."
            )
        sizes, crc = beginning[: _SIZES.size], beginning[_SIZES.size :]
        if len(crc) < _SUM.size:
            return None
        self._check(crc == _SUM.pack(zlib.crc32(sizes)))
        num_header, num_arrays, crc = _SIZES.unpack(sizes)
        header, arrays = file.read(num_header), file.read(num_arrays)
        if len(header) + len(arrays) < num_header + num_arrays:
            return None
        self._check(crc == zlib.crc32(arrays, zlib.crc32(header)))
        return Packed(msgspec.Raw(header), arrays)

    def _check(self, is_whole: bool) -> None:
        if not is_whole and self.header is None:
            raise self._error(
                "it must be a file that rollout.record has written, but it does not begin as one, or is "
                "damaged. Name another file, or take a copy of it."
            )
        if not is_whole:
            raise self._error(
                "it must hold what was written, but a checksum differs: the file is damaged. Take a copy "
                "of it, or record again."
            )

    def _open(self) -> BinaryIO:
        check_regular(self._path)
        if _is_gzip(self._path):
            return cast(BinaryIO, gzip.open(self._path, "rb"))
        return open_regular(self._path)

    def _check_header(self, header: RecordHeader) -> None:
        if header.format != FORMAT or header.format_version != FORMAT_VERSION:
            raise self._error(
                f"the format must be {FORMAT} {FORMAT_VERSION}, got {header.format} "
                f"{header.format_version}. Name a file that rollout.record has written."
            )
        if self._vocab_size not in (None, header.vocab_size):
            raise self._error(
                f"the file was recorded with a vocabulary of {header.vocab_size} tokens, "
                f"but the model in model.hf_assets_path has {self._vocab_size}. Set "
                "model.hf_assets_path to the model that the file was recorded with."
            )
        if self._temperature not in (None, header.temperature):
            raise self._error(
                f"the file was recorded with rollout.temperature = {header.temperature}, "
                f"but this run has {self._temperature}. The recorded logprobs and those of the "
                "trainer would belong to different distributions. Set rollout.temperature = "
                f"{header.temperature}."
            )


def _is_gzip(path: Path | str) -> bool:
    return str(path).endswith(".gz")
