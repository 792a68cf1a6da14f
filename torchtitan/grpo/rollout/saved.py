# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Saves rollouts that are not yet trained on in a file beside the checkpoint.

A resumed run continues with them. Finished groups wait again for their batch, and groups in
progress keep the completions that exist. Nothing is generated twice, so long answers are not
at a disadvantage. The file is optional: without it, the prompts are still open in the ledger
and are generated again. So they are if the file is damaged: it holds a checksum, and
`saved_checks.py` checks what is read.
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from torchtitan.grpo.rollout import group_frames
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.system.files import read_regular
from torchtitan.grpo.types import (
    FinishReason,
    Generation,
    PromptProgress,
    RolloutGroup,
    VersionSegment,
)

FOLDER = "rollouts"
"""Folder in the dump folder. It holds one file per checkpoint, named after the step."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that is not finished.

    Attributes:
        group_id: Index of the prompt.
        start_version: Version that the group was admitted with. Its deadline counts from there.
        generations: The completions that are finished.
        begun: The generated parts of the other completions.
    """

    group_id: int
    start_version: int
    generations: tuple[Generation, ...]
    begun: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class SavedRollouts:
    """Everything that a rollout process holds between two batches.

    Attributes:
        version: Number of batches trained on.
        progress: Current progress of the prompts.
        closed: Prompts closed since the last batch, with the reasons.
        finished: Groups that wait for training.
        unfinished: Groups in progress.
    """

    version: int
    progress: PromptProgress
    closed: dict[int, CloseReason] = field(default_factory=dict)
    finished: tuple[RolloutGroup, ...] = ()
    unfinished: tuple[UnfinishedGroup, ...] = ()

    @property
    def num_rollouts(self) -> int:
        """Number of completions, finished or begun, that need not be generated again."""
        finished = sum(len(group.rollouts) for group in self.finished)
        return finished + sum(len(g.generations) + len(g.begun) for g in self.unfinished)

    @property
    def group_ids(self) -> set[int]:
        """IDs of all saved groups."""
        return {group.group_id for group in (*self.finished, *self.unfinished)}


class SavedRolloutsError(ValueError):
    """Raised if a file of saved rollouts cannot be used. The message says why."""


class _Generation(msgspec.Struct):
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    segments: list[tuple[int, int, int]]
    sampled: bytes | None = None
    environment_reward: float | None = None
    num_context: int = 0
    new_rows: list[tuple[int, int]] = []


class _Unfinished(msgspec.Struct):
    group_id: int
    start_version: int
    generations: list[_Generation]
    begun: list[_Generation]


class _Sealed(msgspec.Struct):
    """What is in a file: a :class:`_File` with its CRC-32. Earlier releases wrote a bare one."""

    crc32: int | None = None
    content: msgspec.Raw = msgspec.Raw()


class _File(msgspec.Struct):
    version: int
    position: int
    open: list[int]
    closed: dict[int, CloseReason]
    finished: list[group_frames.GroupHeader]
    frames: list[bytes]
    unfinished: list[_Unfinished]


def file_of(dump_folder: str, step: int) -> Path:
    """Returns the path of the saved rollouts of a step."""
    return Path(dump_folder) / FOLDER / f"step-{step}.msgpack"


def write_saved(path: Path, saved: SavedRollouts) -> None:
    """Writes the file atomically: it is either complete or unchanged."""
    headers, frames = group_frames.pack_groups(saved.finished)
    file = _File(
        version=saved.version,
        position=saved.progress.position,
        open=list(saved.progress.open),
        closed=saved.closed,
        finished=headers,
        frames=frames,
        unfinished=[
            _Unfinished(
                g.group_id,
                g.start_version,
                [_packed(one) for one in g.generations],
                [_packed(one) for one in g.begun],
            )
            for g in saved.unfinished
        ],
    )
    content = msgspec.msgpack.encode(file)
    sealed = msgspec.msgpack.encode(_Sealed(zlib.crc32(content), msgspec.Raw(content)))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(sealed)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_saved(path: Path, version: int) -> SavedRollouts:
    """Reads a file that :func:`write_saved` wrote.

    Raises:
        SavedRolloutsError: If the file is damaged or belongs to another step.
    """
    try:
        file = msgspec.msgpack.decode(_unsealed(read_regular(path)), type=_File)
        saved = SavedRollouts(
            version=file.version,
            progress=PromptProgress(file.position, tuple(file.open)),
            closed=file.closed,
            finished=tuple(group_frames.unpack_groups(file.finished, file.frames)),
            unfinished=tuple(
                UnfinishedGroup(
                    g.group_id,
                    g.start_version,
                    tuple(map(_unpacked, g.generations)),
                    tuple(map(_unpacked, g.begun)),
                )
                for g in file.unfinished
            ),
        )
    except (OSError, ValueError, LookupError) as error:  # msgspec's errors are ValueErrors
        raise SavedRolloutsError(f"the file cannot be read: {error}") from error
    if saved.version != version:
        raise SavedRolloutsError(
            f"it must hold the rollouts of step {version}, got those of step {saved.version}"
        )
    return saved


def _unsealed(content: bytes) -> bytes | msgspec.Raw:
    sealed = msgspec.msgpack.decode(content, type=_Sealed)
    if not sealed.content:
        return content
    if sealed.crc32 != zlib.crc32(sealed.content):
        raise ValueError("its checksum is not that of its content")
    return sealed.content


def discard_after(dump_folder: str, step: int) -> None:
    """Removes the files of all steps after ``step``, where a run begins."""
    for file in (Path(dump_folder) / FOLDER).glob("step-*.msgpack"):
        if int(file.stem.removeprefix("step-")) > step:
            file.unlink(missing_ok=True)


def remove_others(dump_folder: str, kept_steps: Sequence[int]) -> None:
    """Removes the files whose checkpoints no longer exist."""
    kept = {file_of(dump_folder, step) for step in kept_steps}
    for file in (Path(dump_folder) / FOLDER).glob("step-*.msgpack"):
        if file not in kept:
            file.unlink(missing_ok=True)


def _packed(generation: Generation) -> _Generation:
    return _Generation(
        token_ids=np.asarray(generation.token_ids, np.int32).tobytes(),
        logprobs=np.asarray(generation.logprobs, np.float32).tobytes(),
        finish_reason=generation.finish_reason,
        segments=[(s.version, s.start, s.end) for s in generation.segments],
        sampled=None if generation.sampled is None else generation.sampled.tobytes(),
        environment_reward=generation.environment_reward,
        num_context=generation.num_context,
        new_rows=list(generation.new_rows),
    )


def _unpacked(packed: _Generation) -> Generation:
    return Generation(
        token_ids=np.frombuffer(packed.token_ids, np.int32),
        logprobs=np.frombuffer(packed.logprobs, np.float32),
        finish_reason=packed.finish_reason,
        segments=tuple(VersionSegment(*segment) for segment in packed.segments),
        sampled=None if packed.sampled is None else np.frombuffer(packed.sampled, np.bool_),
        environment_reward=packed.environment_reward,
        num_context=packed.num_context,
        new_rows=tuple(packed.new_rows),
    )
