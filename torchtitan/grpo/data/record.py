# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records batches of rollouts in a file, from which a run can train on them again.

The file holds JSON lines: a header, then one for each batch, in the order of training. Columns of
rollouts (`types.py`) are lists of numbers, and base64 of the arrays if they have a list for each
token. Logprobs are float64 numbers that equal the float32 ones exactly. Each line begins with the
CRC-32 of the rest of it, which a line that was changed by hand may leave out. In ``.gz`` files each
line is a separate gzip member: a run that ends at any time leaves complete lines.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, get_type_hints

import msgspec
import numpy as np

from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.file_formats import UTF8_MARK, not_json_lines
from torchtitan.grpo.system.files import check_regular, open_regular
from torchtitan.grpo.types import Column, PromptProgress, Rollout, RolloutGroup, columns_of

_Value = TypeVar("_Value")

FORMAT = "torchtitan-grpo-rollouts"
FORMAT_VERSION = 4
READABLE_VERSIONS = (3, 4)
_SUM = re.compile(rb'\{"crc32":(\d+),')


def decode_line(line: bytes, kind: type[_Value], where: str) -> _Value:
    """Decodes a line of JSON; :class:`DataError` names ``where``, which is ``key: file:number``."""
    try:
        return msgspec.json.decode(line.removeprefix(UTF8_MARK), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        path, _, number = where.rpartition(" ")[2].rpartition(":")
        found = not_json_lines(line, path, is_first=number == "1")
        raise DataError(f"{where}: {found or f'{error}.'}") from error


class RecordHeader(msgspec.Struct):
    format: str
    format_version: int
    vocab_size: int
    temperature: float | None = None
    """``None`` in files of format 1, which are refused."""


@dataclass(frozen=True)
class BatchRecord:
    """One planned batch, trained on by policy ``version``; ``progress`` includes it."""

    version: int
    progress: PromptProgress
    groups: Sequence[RolloutGroup]


class RolloutRecorder:
    """Appends each batch to ``rollout.record`` before it is trained on.

    A run that resumes after ``version`` batches drops later ones, which are generated again. Raises
    :class:`DataError` if a new run would overwrite batches, if the file cannot be written, or if a
    resumed run finds other batches than it has trained on.
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
            # Unbuffered, so that a line that found no room is not written again at the end.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise DataError(f"rollout.record: {path} cannot be written: {error}.") from error

    def write(self, version: int, progress: PromptProgress, groups: Sequence[RolloutGroup]) -> None:
        line = self._line(_batch_fields(BatchRecord(version, progress, groups)))
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def _batches(self) -> Iterator[BatchRecord]:
        header = self._header
        assert header.temperature is not None
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
                file.write(self._line(self._header))
                for batch in kept:
                    file.write(self._line(_batch_fields(batch)))
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _line(self, record: RecordHeader | dict[str, Any]) -> bytes:
        line = msgspec.json.encode(record)
        line = b'{"crc32":%d,%b\n' % (zlib.crc32(line), line[1:])
        return gzip.compress(line, compresslevel=1, mtime=0) if self._path.suffix == ".gz" else line


class RecordReader:
    """Iterates over the batches of a file as (where, record), with one batch in memory at a time.

    Each iteration reads the file from its beginning, and raises :class:`DataError` if it cannot be
    used. An incomplete last line, which a run leaves that is killed while writing, is skipped, and
    ``was_cut_off`` set: the run has not trained on that batch.
    """

    def __init__(self, path: str, vocab_size: int, temperature: float, key: str) -> None:
        self._path, self._vocab_size, self._key = path, vocab_size, key
        self._temperature = temperature
        self.was_cut_off = False

    def __iter__(self) -> Iterator[tuple[str, BatchRecord]]:
        self.was_cut_off = False
        number = 0
        for number, line in enumerate(self._lines(), start=1):
            where = f"{self._key}: {self._path}:{number}"
            _check_sum(line, where)
            if number == 1:
                self._check_header(line, where)
            else:
                batch = decode_line(line, _BatchLine, where)
                groups = [
                    _group(group, f"{where}, group {group.group_id}") for group in batch.groups
                ]
                yield where, BatchRecord(batch.version, batch.progress, groups)
        if number == 0:
            raise DataError(f"{self._key}: {self._path} is empty: it has no header.")

    def _lines(self) -> Iterator[bytes]:
        try:
            with self._open() as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        self.was_cut_off = True
                        return
                    yield line
        except EOFError:  # a gzip member that was cut off
            self.was_cut_off = True
        except (OSError, zlib.error) as error:
            raise DataError(f"{self._key}: {self._path} cannot be read: {error}.") from error

    def _open(self) -> BinaryIO:
        check_regular(self._path)
        if self._path.endswith(".gz"):
            return cast(BinaryIO, gzip.open(self._path, "rb"))
        return open_regular(self._path)

    def _check_header(self, line: bytes, where: str) -> None:
        header = decode_line(line, RecordHeader, where)
        if header.format != FORMAT or header.format_version not in READABLE_VERSIONS:
            raise DataError(
                f"{where}: the format must be {FORMAT} {FORMAT_VERSION}, got {header.format} "
                f"{header.format_version}. Name a file that rollout.record has written."
            )
        if header.vocab_size != self._vocab_size:
            raise DataError(
                f"{where}: the file was recorded with a vocabulary of {header.vocab_size} tokens, "
                f"but the model in model.hf_assets_path has {self._vocab_size}. Set "
                "model.hf_assets_path to the model that the file was recorded with."
            )
        if header.temperature != self._temperature:
            raise DataError(
                f"{where}: the file was recorded with rollout.temperature = {header.temperature}, "
                f"but this run has {self._temperature}. The recorded logprobs and those of the "
                "trainer would belong to different distributions. Set rollout.temperature = "
                f"{header.temperature}."
            )


def _check_sum(line: bytes, where: str) -> None:
    found = _SUM.match(line)
    if found and zlib.crc32(b"{" + line[found.end() :].rstrip(b"\r\n")) != int(found[1]):
        raise DataError(
            f"{where}: the line must be what was written, but its checksum differs: the file is "
            "damaged. Take a copy of it, or remove this line and all behind it. If you have changed "
            'the line yourself, remove its "crc32".'
        )


class _Lists(msgspec.Struct):
    """A column with a list of values for each token, [tokens, k], little-endian."""

    k: int
    data: bytes


class _TopTokens(msgspec.Struct):
    """Format 3: both columns of a teacher's most likely tokens in one."""

    k: int
    ids: bytes
    logprobs: bytes


def _line_type(column: Column) -> Any:
    if column.is_list:
        return _Lists
    # Of a mask, the spans [start, end) of the tokens whose value is not the usual one.
    return {"i": list[int], "f": list[float], "b": list[tuple[int, int]]}[
        np.dtype(column.dtype).kind
    ]


def _line_fields() -> Iterator[tuple[str, Any] | tuple[str, Any, Any]]:
    columns, hints = columns_of(Rollout), get_type_hints(Rollout)
    for field in fields(Rollout):
        name, kind = field.name, hints[field.name]
        if column := columns.get(name):
            name, kind = column.record_name or name, _line_type(column)
            kind = kind if field.default is MISSING else kind | None
        if field.default_factory is not MISSING:
            yield name, kind, msgspec.field(default_factory=field.default_factory)
        elif field.default is not MISSING:
            yield name, kind, field.default
        elif name != "prompt_ids":  # the group has them
            yield name, kind
    yield "teacher_top", _TopTokens | None, None


_RolloutLine = msgspec.defstruct("_RolloutLine", list(_line_fields()), kw_only=True)


class _GroupLine(msgspec.Struct):
    group_id: int
    prompt_ids: list[int]
    rollouts: list[_RolloutLine]  # pyright: ignore[reportInvalidTypeForm]
    prompt_text: str = ""
    server_url: str = ""
    columns: dict[str, Any] = {}
    is_chat: bool = False
    file: str = ""


class _BatchLine(msgspec.Struct):
    version: int
    progress: PromptProgress
    groups: list[_GroupLine]


def _batch_fields(batch: BatchRecord) -> dict[str, Any]:
    return {
        "version": batch.version,
        "progress": batch.progress,
        "groups": [
            vars(group)
            | {
                "prompt_ids": group.rollouts[0].prompt_ids.tolist(),
                "rollouts": [_rollout_fields(rollout) for rollout in group.rollouts],
            }
            for group in batch.groups
        ],
    }


def _rollout_fields(rollout: Rollout) -> dict[str, Any]:
    found = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    del found["prompt_ids"]
    for name, column in columns_of(Rollout).items():
        values = found.pop(name)
        if values is None:
            continue
        if column.is_list:
            kept = _Lists(values.shape[1], values.astype(_little_endian(column)).tobytes())
        elif values.dtype == np.bool_:
            kept = _spans(values != column.fill)
        else:
            kept = values.tolist()
        found[column.record_name or name] = kept
    return found


def _group(line: _GroupLine, where: str) -> RolloutGroup:
    try:
        prompt_ids = np.array(line.prompt_ids, np.int32)
        rollouts = tuple(_rollout(rollout, prompt_ids) for rollout in line.rollouts)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: {error}.") from error
    given: dict[str, Any] = {**msgspec.structs.asdict(line), "rollouts": rollouts}
    del given["prompt_ids"]
    return RolloutGroup(**given)


def _rollout(line: msgspec.Struct, prompt_ids: np.ndarray) -> Rollout:
    found = msgspec.structs.asdict(line)
    if top := found.pop("teacher_top"):
        found["teacher_top_ids"] = _Lists(top.k, top.ids)
        found["teacher_top_logprobs"] = _Lists(top.k, top.logprobs)
    num_tokens = len(found["completion_ids"])
    for name, column in columns_of(Rollout).items():
        kept = found.pop(column.record_name or name)
        if kept is None or (column.dtype is np.bool_ and not kept):
            found[name] = None
        elif column.is_list:
            values = np.frombuffer(kept.data, _little_endian(column))
            if len(values) != num_tokens * kept.k:
                raise ValueError(
                    f"{name} must hold {num_tokens * kept.k} values (k = {kept.k} for each of "
                    f"{num_tokens} completion tokens), got {len(values)}"
                )
            found[name] = values.astype(column.dtype, copy=False).reshape(num_tokens, kept.k)
        elif column.dtype is np.bool_:
            found[name] = _mask(kept, num_tokens, column)
        else:
            found[name] = np.array(kept, column.dtype)
    return Rollout(**found, prompt_ids=prompt_ids)


def _little_endian(column: Column) -> np.dtype[Any]:
    return np.dtype(column.dtype).newbyteorder("<")


def _spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """The [start, end) of each run of True."""
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(start), int(end)) for start, end in borders.reshape(-1, 2)]


def _mask(spans: Sequence[tuple[int, int]], num_tokens: int, column: Column) -> np.ndarray:
    borders = [0, *(border for span in spans for border in span), num_tokens]
    if any(start > end for start, end in pairwise(borders)):
        raise ValueError(
            f"{column.record_name} must be ascending spans within the {num_tokens} completion "
            f"tokens, got {list(spans)}"
        )
    mask = column.filled(num_tokens)
    for start, end in spans:
        mask[start:end] = not column.fill
    return mask
