# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records batches of rollouts in a file, from which a run can train on them again.

The file holds JSON lines: a header, then one line for each batch, in the order of training.
Logprobs are written as float64 numbers that equal the float32 ones exactly, so that reading
restores the same bits. The most likely tokens of a teacher (``teacher.top_k``), of which there are
many, are written as base64 of the arrays themselves. Each line begins with the CRC-32 of the rest
of it; lines of earlier releases have none. If the name ends in ``.gz``, each line is a gzip
member of its own: a run that ends at any time leaves complete lines, and ``zcat`` shows them.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from torchtitan.grpo.data.files import DataError, decode_line
from torchtitan.grpo.system.files import check_regular, open_regular
from torchtitan.grpo.types import (
    FinishReason,
    PromptProgress,
    Rollout,
    RolloutGroup,
    TopTokens,
    VersionSegment,
)

FORMAT = "torchtitan-grpo-rollouts"
FORMAT_VERSION = 3
_SUM = re.compile(rb'\{"crc32":(\d+),')


class RecordHeader(msgspec.Struct):
    """The first line of a file of recorded rollouts tells how they were made.

    Attributes:
        vocab_size: Vocabulary size of the model that wrote the rollouts.
        temperature: ``rollout.temperature`` of the run, which the logprobs depend on.
    """

    format: str
    format_version: int
    vocab_size: int
    temperature: float | None = None
    """``None`` in files of format 1, which are refused."""


class TopTokensRecord(msgspec.Struct):
    """A teacher's most likely tokens at each completion token of a rollout.

    Attributes:
        k: Number of them for each token.
        ids: [tokens, k] int32, little-endian.
        logprobs: [tokens, k] float32, little-endian.
    """

    k: int
    ids: bytes
    logprobs: bytes


class RolloutRecord(msgspec.Struct):
    """A rollout; the group holds its prompt.

    Attributes:
        segments: (version, start, end).
        observed: Ascending spans (start, end) of completion tokens that are not trained.
        num_context: Number of tokens in these spans that a model wrote; an environment inserted
            the others.
        new_rows: (start, num_context) of each place where the completion goes on in another context.
        teacher_logprobs: Logprob of each completion token under the teacher; None if no teacher has
            rated the rollout.
        teacher_top: The teacher's most likely tokens; None without ``teacher.top_k``.
    """

    completion_ids: list[int]
    logprobs: list[float]
    segments: list[tuple[int, int, int]]
    reward: float | None
    finish_reason: FinishReason = "stop"
    completion: str = ""
    reward_components: dict[str, float] = msgspec.field(default_factory=dict)
    observed: list[tuple[int, int]] = msgspec.field(default_factory=list)
    num_context: int = 0
    new_rows: list[tuple[int, int]] = msgspec.field(default_factory=list)
    teacher_logprobs: list[float] | None = None
    teacher_top: TopTokensRecord | None = None


class GroupRecord(msgspec.Struct):
    """All rollouts of one prompt."""

    group_id: int
    prompt_ids: list[int]
    rollouts: list[RolloutRecord]
    prompt_text: str = ""
    server_url: str = ""
    columns: dict[str, Any] = msgspec.field(default_factory=dict)
    is_chat: bool = False
    file: str = ""


class BatchRecord(msgspec.Struct):
    """One line of a file of recorded rollouts holds one batch.

    Attributes:
        version: Policy version that was trained on it.
        progress: Progress through the prompts, this batch included.
        groups: The groups, as they were planned.
    """

    version: int
    progress: PromptProgress
    groups: list[GroupRecord]


class RolloutRecorder:
    """Appends each batch to ``rollout.record`` before it is trained on.

    A resumed run keeps the batches before its checkpoint and drops the later ones, which are
    generated and trained again.

    Args:
        path: The file. It is compressed if its name ends in ``.gz``.
        vocab_size: Vocabulary size of the model.
        temperature: ``rollout.temperature``.
        version: Number of batches already trained on.

    Raises:
        DataError: If a new run would overwrite the file, if the file cannot be written, or if a
            resumed run finds other batches in it than those it has trained on.
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
        """Appends one batch to the file."""
        record = BatchRecord(version, progress, [_group_record(group) for group in groups])
        line = self._line(record)
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
        """Returns the batches that a resumed run has trained on; refuses a file that lacks any."""
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
        """Writes the header, followed by the batches that a resumed run keeps."""
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            with partial.open("wb") as file:
                file.write(self._line(self._header))
                for batch in kept:
                    file.write(self._line(batch))
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _line(self, record: RecordHeader | BatchRecord) -> bytes:
        line = _with_sum(msgspec.json.encode(record)) + b"\n"
        return gzip.compress(line, compresslevel=1, mtime=0) if self._path.suffix == ".gz" else line


class RecordReader:
    """Iterates over the batches of a file as (where, record), with one batch in memory at a time.

    Each iteration reads the file from its beginning. An incomplete last line, which a run leaves
    if it is killed while writing, is skipped: the run has not trained on that batch.

    Args:
        path: The file.
        vocab_size: Vocabulary size of this run's model.
        temperature: ``rollout.temperature`` of this run.
        key: TOML key of ``path``, for messages.

    Attributes:
        was_cut_off: True if the last iteration found an incomplete last line.

    Raises:
        DataError: If the file or one of its lines cannot be used; raised during iteration.
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
                yield where, decode_line(line, BatchRecord, where)
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
        if (header.format, header.format_version) != (FORMAT, FORMAT_VERSION):
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


def _with_sum(line: bytes) -> bytes:
    return b'{"crc32":%d,%b' % (zlib.crc32(line), line[1:])


def _check_sum(line: bytes, where: str) -> None:
    found = _SUM.match(line)
    if found and zlib.crc32(b"{" + line[found.end() :].rstrip(b"\r\n")) != int(found[1]):
        raise DataError(
            f"{where}: the line must be what was written, but its checksum differs: the file is "
            "damaged. Take a copy of it, or remove this line and all behind it. If you have changed "
            'the line yourself, remove its "crc32".'
        )


def read_groups(record: BatchRecord) -> list[RolloutGroup]:
    """Returns the groups of a batch, with arrays as they were recorded."""
    return [_group(group) for group in record.groups]


def _group_record(group: RolloutGroup) -> GroupRecord:
    return GroupRecord(
        group_id=group.group_id,
        prompt_ids=group.rollouts[0].prompt_ids.tolist(),
        rollouts=[
            RolloutRecord(
                completion_ids=r.token_ids.tolist(),
                logprobs=r.logprobs.tolist(),
                segments=[(s.version, s.start, s.end) for s in r.segments],
                reward=r.reward,
                finish_reason=r.finish_reason,
                completion=r.completion,
                reward_components=r.reward_components,
                observed=[] if r.sampled is None else _observed_spans(r.sampled),
                num_context=r.num_context,
                new_rows=list(r.new_rows),
                teacher_logprobs=(
                    None if r.teacher_logprobs is None else r.teacher_logprobs.tolist()
                ),
                teacher_top=None if r.teacher_top is None else _top_record(r.teacher_top),
            )
            for r in group.rollouts
        ],
        prompt_text=group.prompt_text,
        server_url=group.server_url,
        columns=group.columns,
        is_chat=group.is_chat,
        file=group.file,
    )


def _group(record: GroupRecord) -> RolloutGroup:
    prompt_ids = np.array(record.prompt_ids, dtype=np.int32)
    rollouts = tuple(
        Rollout(
            prompt_ids=prompt_ids,
            token_ids=np.array(r.completion_ids, dtype=np.int32),
            logprobs=np.array(r.logprobs, dtype=np.float32),
            segments=tuple(VersionSegment(*segment) for segment in r.segments),
            finish_reason=r.finish_reason,
            completion=r.completion,
            reward=r.reward,
            reward_components=r.reward_components,
            sampled=sampled_mask(r.observed, len(r.completion_ids)) if r.observed else None,
            num_context=r.num_context,
            new_rows=tuple(r.new_rows),
            teacher_logprobs=(
                None
                if r.teacher_logprobs is None
                else np.array(r.teacher_logprobs, dtype=np.float32)
            ),
            teacher_top=None if r.teacher_top is None else read_top(r.teacher_top),
        )
        for r in record.rollouts
    )
    return RolloutGroup(
        record.group_id, record.prompt_text, rollouts, record.server_url,
        columns=record.columns, is_chat=record.is_chat, file=record.file,
    )  # fmt: skip


def _top_record(top: TopTokens) -> TopTokensRecord:
    return TopTokensRecord(
        top.ids.shape[1], top.ids.astype("<i4").tobytes(), top.logprobs.astype("<f4").tobytes()
    )


def read_top(record: TopTokensRecord) -> TopTokens:
    """Returns the arrays of a teacher's most likely tokens, which are read-only.

    Raises:
        ValueError: If they are not whole.
    """
    ids, logprobs = np.frombuffer(record.ids, "<i4"), np.frombuffer(record.logprobs, "<f4")
    return TopTokens(
        ids.astype(np.int32, copy=False).reshape(-1, record.k),
        logprobs.astype(np.float32, copy=False).reshape(-1, record.k),
    )


def _observed_spans(sampled: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of tokens that were not sampled."""
    borders = np.flatnonzero(np.diff(sampled, prepend=True, append=True))
    return [(int(start), int(end)) for start, end in borders.reshape(-1, 2)]


def sampled_mask(observed: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """Returns the mask of trained tokens, [tokens] bool, from the spans of those that are not."""
    sampled = np.ones(num_tokens, np.bool_)
    for start, end in observed:
        sampled[start:end] = False
    return sampled
