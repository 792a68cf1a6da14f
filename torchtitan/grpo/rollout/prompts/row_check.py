# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the rows of a prompt set before training, or a sample of rows if all would take too long.

Invariants:

- Of a set of at most :data:`FULL_CHECK_ROWS` rows and :data:`FULL_CHECK_BYTES`, every row is
  read and its prompt and columns are judged. Of a larger set, only the first rows, the last row,
  and rows spread evenly between them are read and judged.
- Prompts are tokenized, and chat messages rendered, for up to :data:`TOKENIZED_ROWS` rows and
  :data:`TOKENIZED_CHARACTERS`, spread evenly. One conversation of each sequence of roles is added,
  because chat templates refuse certain sequences.
- A bad row that is found here makes the set unusable. A bad row that is found later, when it is drawn,
  is left out and counted, so that it does not end a run that has already learned something.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan.grpo.rollout.prompts.prompt_set import (
    CheckedRows,
    PromptSet,
    PromptText,
    num_characters,
)
from torchtitan.grpo.rollout.tables import RowError
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)

FULL_CHECK_ROWS = 1_000_000
FULL_CHECK_BYTES = 2 << 30
TOKENIZED_ROWS = 20_000
TOKENIZED_CHARACTERS = 16 << 20

_FIRST_ROWS = 1024
_SPREAD_ROWS = 4096
_BLOCK_ROWS = 4096
_MOST_SHAPES = 1000
_PROGRESS_SECONDS = 5.0
_FAULT_SECONDS = 2.0  # how long rows are still tokenized, to be counted, behind the first bad one


Judge = Callable[[Mapping[str, Any]], str | None]
"""Says why a row's columns cannot be used; ``None`` if they can."""


def sample_rows(num_rows: int) -> list[int]:
    """The rows of a large set that are checked, in order."""
    spread = np.linspace(0, num_rows - 1, min(num_rows, _SPREAD_ROWS)).astype(np.int64)
    return np.union1d(np.arange(min(num_rows, _FIRST_ROWS)), spread).tolist()


def check_rows(
    prompts: PromptSet,
    judge: Judge = lambda columns: None,
    *,
    say: Callable[[str], object] = logger.info,
) -> CheckedRows:
    """Checks the rows of a set. Raises ValueError, which names the first bad row, if any is bad."""
    progress = _Progress(prompts, say)
    bad: dict[int, str] = {}
    sizes: dict[int, int] = {}
    shapes: dict[tuple[str, ...], int] = {}
    num_checked = 0
    for first, end in _ranges(prompts):
        for row, found in enumerate(prompts.texts(first, end), start=first):
            if isinstance(found, RowError):
                bad[row] = str(found)
            elif problem := judge(found[0]):
                bad[row] = f"{prompts.where(row)}: {problem}"
            else:
                sizes[row] = min(num_characters(found[1]), prompts.most_characters)
                if len(shapes) < _MOST_SHAPES:
                    shapes.setdefault((*_shape(found[1]), str("tools" in found[0])), row)
        num_checked += end - first
        progress.note(num_checked, "read")
    num_tokenized, num_fitting, ends = 0, 0, math.inf
    for row in (rows := _rows_to_tokenize(sizes, set(shapes.values()))):
        num_tokenized += 1
        try:
            num_fitting += prompts.prompt(row, row) is not None
        except RowError as error:
            bad[row] = str(error)
            ends = min(ends, time.monotonic() + _FAULT_SECONDS)
        if time.monotonic() > ends:
            break  # a template that renders nothing fails for each of them, and slowly
        if num_tokenized == 1:  # the process that renders has started
            progress = _Progress(prompts, say)
        progress.note(num_tokenized, "tokenized")
    num_checked -= len(rows) - num_tokenized
    _refuse_bad_rows(prompts, [bad[row] for row in sorted(bad)], num_checked)
    prompts.checked = CheckedRows(
        len(prompts), num_checked, num_tokenized, num_fitting, prompts.limits
    )
    return prompts.checked


def first_prompts(
    prompts: PromptSet, num_prompts: int, judge: Judge = lambda columns: None
) -> tuple[list[Prompt], int]:
    """Returns the first ``num_prompts`` prompts (0 means all), and how many were too long.

    Raises ``ValueError`` if a row cannot be used, or if all prompts are too long.
    """
    num_rows = min(num_prompts or len(prompts), len(prompts))
    usable, bad = [], []
    for row in range(num_rows):
        try:
            prompt = prompts.prompt(row, row)
        except RowError as error:
            _refuse_bad_rows(prompts, [*bad, str(error)], row + 1)
            raise
        problem = None if prompt is None else judge(prompt.columns)
        if problem is not None:
            bad.append(f"{prompts.where(row)}: {problem}")
        elif prompt is not None:
            usable.append(prompt)
    _refuse_bad_rows(prompts, bad, num_rows)
    if not usable:
        raise ValueError(
            f"{prompts.key}: none of the first {num_rows} prompts in {prompts.path} is at most "
            f"{prompts.limits.max_tokens} tokens long. Raise prompts.max_prompt_tokens or "
            "training.seq_len, or evaluate more prompts (evaluation.num_prompts)."
        )
    return usable, num_rows - len(usable)


def _refuse_bad_rows(prompts: PromptSet, bad: Sequence[str], num_checked: int) -> None:
    """Raises ValueError if there are bad rows. ``bad`` has their faults in the order of the rows."""
    if bad:
        raise ValueError(
            f"{prompts.key}: {len(bad)} of the {num_checked} rows of {prompts.path} that were checked "
            f"cannot be used. The first: {bad[0]}"
        )


def _ranges(prompts: PromptSet) -> Iterator[tuple[int, int]]:
    num_rows = len(prompts)
    if num_rows <= FULL_CHECK_ROWS and prompts.num_bytes <= FULL_CHECK_BYTES:
        for first in range(0, num_rows, _BLOCK_ROWS):
            yield first, min(first + _BLOCK_ROWS, num_rows)
        return
    for row in sample_rows(num_rows):
        yield row, row + 1


def _rows_to_tokenize(sizes: dict[int, int], always: set[int]) -> list[int]:
    """Evenly spread rows, at most as many as the limits of this module allow, and the rows ``always``."""
    rows, total = list(sizes), sum(sizes.values())
    share = min(1.0, TOKENIZED_CHARACTERS / max(total, 1))
    number = max(1, min(TOKENIZED_ROWS, int(share * len(rows))))
    if number >= len(rows):
        return rows
    spread = np.linspace(0, len(rows) - 1, number).astype(np.int64).tolist()
    return sorted({rows[i] for i in spread} | always)


def _shape(text: PromptText) -> tuple[str, ...]:
    """The properties of a conversation, other than its text, that a chat template may depend on."""
    if isinstance(text, str):
        return ()
    return tuple(
        f"{message['role']} {type(message['content']).__name__} {len(message)}" for message in text
    )


class _Progress:
    def __init__(self, prompts: PromptSet, say: Callable[[str], object]) -> None:
        self._prompts, self._say = prompts, say
        self._told = time.monotonic()

    def note(self, number: int, done: str) -> None:
        if time.monotonic() - self._told >= _PROGRESS_SECONDS:
            self._told = time.monotonic()
            prompts = self._prompts
            self._say(
                f"{prompts.key}: {number:,} of {len(prompts):,} rows of {prompts.path} are {done}."
            )
