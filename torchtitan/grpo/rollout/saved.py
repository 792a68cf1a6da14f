# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rollouts that are not yet trained on, in a file beside the checkpoint.

A resumed run goes on with them: groups that are finished wait again for their batch, and of
groups that are still being written the completions that are there are kept. So neither is
written a second time, and long answers are not at a disadvantage. A checkpoint without the
file is as good but for that work: its prompts are open in the ledger, and begun anew.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from torchtitan.grpo.rollout import group_frames
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import (
    FinishReason,
    Generation,
    PromptProgress,
    RolloutGroup,
    VersionSegment,
)

FOLDER = "rollouts"
"""In the dump folder; a file a checkpoint, named as its step."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group of which some completions are there.

    Attributes:
        group_id: The prompt's index.
        start_version: Which the group was admitted with: its deadline counts from there.
        generations: The completions that are there.
        begun: Of others what is there of them.
    """

    group_id: int
    start_version: int
    generations: tuple[Generation, ...]
    begun: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class SavedRollouts:
    """All that a rollout process holds between two batches.

    Attributes:
        version: Batches trained on.
        progress: Of the prompts, now.
        closed: Prompts closed since the last batch, with their reasons.
        finished: Groups that wait to be trained on.
        unfinished: Groups that are being written.
    """

    version: int
    progress: PromptProgress
    closed: dict[int, CloseReason] = field(default_factory=dict)
    finished: tuple[RolloutGroup, ...] = ()
    unfinished: tuple[UnfinishedGroup, ...] = ()

    @property
    def group_ids(self) -> set[int]:
        """Of all groups that are kept."""
        return {group.group_id for group in (*self.finished, *self.unfinished)}


class SavedRolloutsError(ValueError):
    """A file of saved rollouts cannot be used; the message says what to do."""


class _Generation(msgspec.Struct):
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    segments: list[tuple[int, int, int]]
    sampled: bytes | None = None
    environment_reward: float | None = None
    num_context: int = 0


class _Unfinished(msgspec.Struct):
    group_id: int
    start_version: int
    generations: list[_Generation]
    begun: list[_Generation]


class _File(msgspec.Struct):
    version: int
    position: int
    open: list[int]
    closed: dict[int, CloseReason]
    finished: list[group_frames.GroupHeader]
    frames: list[bytes]
    unfinished: list[_Unfinished]


def file_of(dump_folder: str, step: int) -> Path:
    """Where the rollouts of a step are kept."""
    return Path(dump_folder) / FOLDER / f"step-{step}.msgpack"


def write_saved(path: Path, saved: SavedRollouts) -> None:
    """Writes the file whole, or leaves what was there."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(msgspec.msgpack.encode(file))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def read_saved(path: Path, version: int) -> SavedRollouts:
    """Reads what :func:`write_saved` wrote.

    Raises:
        SavedRolloutsError: It is damaged, or of another step.
    """
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise SavedRolloutsError(
            f"{path} must hold the rollouts that were saved with the checkpoint of step "
            f"{version}: {error}. Remove it, and its prompts are asked anew."
        ) from error
    if file.version != version:
        raise SavedRolloutsError(
            f"{path} must be of step {version}, got {file.version}. Remove it, and its prompts "
            "are asked anew."
        )
    return SavedRollouts(
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


def discard_after(dump_folder: str, step: int) -> None:
    """Removes the files of later steps than a run begins at."""
    for file in (Path(dump_folder) / FOLDER).glob("step-*.msgpack"):
        if int(file.stem.removeprefix("step-")) > step:
            file.unlink(missing_ok=True)


def remove_others(dump_folder: str, kept_steps: Sequence[int]) -> None:
    """Removes the files of checkpoints that are gone."""
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
    )
