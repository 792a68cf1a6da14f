# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What must hold of rollouts that were kept beside a checkpoint: all that holds of a server's answers."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from torchtitan.grpo.rollout.completion_checks import (
    completion_problem,
    length_problem,
    rating_problem,
)
from torchtitan.grpo.rollout.saved import SavedRollouts, SavedRolloutsError
from torchtitan.grpo.types import Generation, PromptProgress, Rollout


def check_saved(
    saved: SavedRollouts, progress: PromptProgress, *, vocab_size: int, row_len: int
) -> None:
    """Refuses rollouts that cannot be those of a run.

    Args:
        saved: What was read.
        progress: Progress of the run in the checkpoint, which may be older.
        vocab_size: Of the model.
        row_len: ``training.seq_len``.

    Raises:
        SavedRolloutsError: If prompts would be lost or issued twice, or if a completion would not
            pass the checks of a server's answer.
    """
    for problem in (_ledger_problem(saved, progress), *_problems(saved, vocab_size, row_len)):
        if problem is not None:
            raise SavedRolloutsError(problem)


def _ledger_problem(saved: SavedRollouts, progress: PromptProgress) -> str | None:
    """Returns that the ledger would not be exact: each prompt is trained once, or closed."""
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
        for rollout in group.rollouts:
            if problem := _rollout_problem(rollout, saved.version, vocab_size, row_len):
                yield f"in group {group.group_id}, {problem}"
    for unfinished in saved.unfinished:
        if unfinished.start_version > saved.version:
            yield f"group {unfinished.group_id} began after the checkpoint"
        for one in (*unfinished.generations, *unfinished.begun):
            numbers = [] if one.environment_reward is None else [one.environment_reward]
            problem = _completion_problem(one, one.token_ids, one.logprobs, vocab_size)
            problem = problem or length_problem(0, len(one.token_ids), one.new_rows, row_len)
            if problem := problem or _newer(one, saved.version) or _not_finite(numbers):
                yield f"in group {unfinished.group_id}, {problem}"


def _rollout_problem(rollout: Rollout, version: int, vocab_size: int, row_len: int) -> str | None:
    prompt, ids = rollout.prompt_ids, rollout.token_ids
    if not (len(prompt) and prompt.min() >= 0 and prompt.max() < vocab_size):
        return f"the prompt must have token ids in [0, {vocab_size})"
    numbers = [*rollout.reward_components.values()]
    numbers += [] if rollout.reward is None else [rollout.reward]
    return (
        _completion_problem(rollout, ids, rollout.logprobs, vocab_size)
        or length_problem(len(prompt), len(ids), rollout.new_rows, row_len)
        or rating_problem(rollout.teacher_logprobs, rollout.teacher_top, len(ids), vocab_size)
        or _newer(rollout, version)
        or _not_finite(numbers)
    )


def _completion_problem(
    one: Rollout | Generation, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int
) -> str | None:
    return completion_problem(
        ids, logprobs, one.segments, vocab_size=vocab_size, sampled=one.sampled,
        num_context=one.num_context, new_rows=one.new_rows,
    )  # fmt: skip


def _newer(one: Rollout | Generation, version: int) -> str | None:
    newest = max(segment.version for segment in one.segments)
    return f"version {newest} is newer than the checkpoint" if newest > version else None


def _not_finite(rewards: Sequence[float]) -> str | None:
    return None if all(map(math.isfinite, rewards)) else f"rewards must be finite, got {rewards}"
