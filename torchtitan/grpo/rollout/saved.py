# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Saves rollouts that are not yet trained on in a file beside the checkpoint.

A resumed run continues with these rollouts. If a resume discarded them instead, long answers would be
lost more often than short ones. If the file is missing or damaged, their prompts are still open in
the ledger, and their completions are generated again.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchtitan.grpo.rollout.codec import Packed, pack, unpack
from torchtitan.grpo.rollout.completion_checks import (
    completion_problem,
    length_problem,
    reward_problem,
    rollout_problem,
)
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.system.files import read_regular, write_whole
from torchtitan.grpo.types import (
    Generation,
    PromptProgress,
    RolloutGroup,
    separated,
)

FOLDER = "rollouts"
"""Folder in the dump folder. It holds one file per checkpoint, named after the step."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that started under version ``start_version`` and has no rewards yet.

    ``generations`` are its finished completions, and ``begun`` parts of unfinished ones.
    """

    group_id: int
    start_version: int
    generations: tuple[Generation, ...]
    begun: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class SavedRollouts:
    """Everything that a rollout process holds between two batches.

    ``version`` is the number of batches trained on, and ``closed`` has the prompts closed since the last.
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
        return {group.group_id for group in (*self.finished, *self.unfinished)}


class SavedRolloutsError(ValueError):
    """A file of saved rollouts cannot be used."""


class _File(msgspec.Struct):
    """The file's content. ``packed`` encodes a :class:`Packed`, and ``crc32`` is its checksum."""

    crc32: int
    packed: bytes


def file_of(dump_folder: str, step: int) -> Path:
    return Path(dump_folder) / FOLDER / f"step-{step}.msgpack"


def write_saved(path: Path, saved: SavedRollouts) -> None:
    packed = msgspec.msgpack.encode(pack(saved))
    path.parent.mkdir(exist_ok=True)  # not its folder's, which may have been removed
    write_whole(path, msgspec.msgpack.encode(_File(zlib.crc32(packed), packed)))


def read_saved(path: Path, version: int) -> SavedRollouts:
    """Reads a file. Raises SavedRolloutsError if it is damaged or belongs to another step."""
    try:
        file = msgspec.msgpack.decode(read_regular(path), type=_File)
        if file.crc32 != zlib.crc32(file.packed):
            raise ValueError("its checksum is not that of its content")
        saved = unpack(msgspec.msgpack.decode(file.packed, type=Packed), SavedRollouts)
    except (OSError, ValueError, LookupError) as error:  # msgspec's errors are ValueErrors
        raise SavedRolloutsError(f"the file cannot be read: {error}") from error
    if saved.version != version:
        raise SavedRolloutsError(
            f"it must hold the rollouts of step {version}, got those of step {saved.version}"
        )
    return saved


def discard_after(dump_folder: str, step: int) -> None:
    for file in (Path(dump_folder) / FOLDER).glob("step-*.msgpack"):
        if int(file.stem.removeprefix("step-")) > step:
            file.unlink(missing_ok=True)


def remove_others(dump_folder: str, kept_steps: Sequence[int]) -> None:
    """Removes the files whose checkpoints no longer exist."""
    kept = {file_of(dump_folder, step) for step in kept_steps}
    for file in (Path(dump_folder) / FOLDER).glob("step-*.msgpack"):
        if file not in kept:
            file.unlink(missing_ok=True)


def check_saved(
    saved: SavedRollouts, progress: PromptProgress, *, vocab_size: int, row_len: int
) -> None:
    """Raises :class:`SavedRolloutsError` if the rollouts cannot belong to the run.

    ``progress`` is the checkpoint's prompt progress. The progress in the file may be newer.
    """
    for problem in (_ledger_problem(saved, progress), *_problems(saved, vocab_size, row_len)):
        if problem is not None:
            raise SavedRolloutsError(problem)


def _ledger_problem(saved: SavedRollouts, progress: PromptProgress) -> str | None:
    found = saved.progress
    since = range(progress.position, found.position)
    issued = [*found.open, *saved.closed]
    # Numbers first: a damaged position can be any.
    is_exact = (
        found.position >= progress.position
        and len(issued) == len(progress.open) + found.position - progress.position
        and sorted(issued) == sorted([*progress.open, *since])
    )
    if not is_exact:
        return "the prompts in it are not those that were open at the checkpoint and those after it"
    kept = [group.group_id for group in (*saved.finished, *saved.unfinished)]
    if len(set(kept)) != len(kept) or not set(kept) <= set(found.open):
        return "it must hold each open prompt once at most, and no other"
    return None


def _problems(saved: SavedRollouts, vocab_size: int, row_len: int) -> Iterator[str | None]:
    for group in saved.finished:
        if not group.rollouts:
            yield f"group {group.group_id} has no rollout"
        for rollout in (*group.rollouts, *group.left_out):
            problem = rollout_problem(rollout, vocab_size=vocab_size, row_len=row_len)
            if not all(map(math.isfinite, rollout.reward_metrics.values())):
                problem = f"reward_metrics must be finite, got {rollout.reward_metrics}"
            if problem := problem or _version_problem(rollout, saved.version):
                yield f"in group {group.group_id}, {problem}"
    for unfinished in saved.unfinished:
        if unfinished.start_version > saved.version:
            yield f"group {unfinished.group_id} began after the checkpoint"
        for one in separated((*unfinished.generations, *unfinished.begun)):
            problem = completion_problem(one, vocab_size) or length_problem(0, one, row_len)
            problem = problem or reward_problem([one.environment_reward])
            if problem := problem or _version_problem(one, saved.version):
                yield f"in group {unfinished.group_id}, {problem}"


def _version_problem(one: Generation, version: int) -> str | None:
    newest = max(segment.version for segment in one.segments)
    return f"version {newest} is newer than the checkpoint" if newest > version else None
