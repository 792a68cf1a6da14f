# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An endless stream of prompts: shuffled, mixed and exactly resumable.

Invariants:

- The index of a prompt determines its set, epoch and row. It depends only on the settings, the
  sizes of the sets and the seed, not on earlier draws.
- A stream returns ``pending`` in ascending order, then all usable indices from ``position`` on. To
  continue another stream exactly, it therefore needs only that stream's position, and as ``pending``
  the prompts which that stream has returned but which were not used up.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from torchtitan.grpo.rollout.prompts.mixture import Interleaving, short_names
from torchtitan.grpo.rollout.prompts.prompt_set import PromptSet
from torchtitan.grpo.rollout.tables import RowError
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)

# Prompts that a resumed run issues again may belong to the previous epoch.
_KEPT_EPOCHS = 2


class EpochOrder:
    """Shuffles rows anew in each epoch. By ``set_number``, sets of equal size get different orders."""

    def __init__(self, num_rows: int, *, seed: int, set_number: int, shuffle: bool) -> None:
        self._num_rows, self._shuffle = num_rows, shuffle
        self._seed, self._set_number = seed, set_number
        self._permutation = lru_cache(_KEPT_EPOCHS)(self._permute)  # several threads may call it

    def row(self, draw: int) -> int:
        epoch, offset = divmod(draw, self._num_rows)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch, self._set_number]).permutation(
            self._num_rows
        )


class Skipped(NamedTuple):
    """A prompt that the stream has left out. ``detail`` is a sentence on what is wrong with its row."""

    index: int
    reason: Literal["too long", "unusable"]
    path: str
    detail: str


class PromptStream:
    """Returns prompts of one or more sets, epoch after epoch. Closing it closes the sets. Thread-safe.

    ``weights`` are by default the sizes of the sets, so that all sets end their epochs together.
    ``position`` is the index of the first new prompt. Rows that are left out have indices, too.
    ``pending`` are distinct indices below ``position`` that were returned earlier and not used up.
    """

    def __init__(
        self,
        sets: Sequence[PromptSet],
        weights: Sequence[float] = (),
        *,
        seed: int,
        shuffle: bool,
        position: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        _check_pending(pending, position)
        self.sets = list(sets)
        self._interleaving = Interleaving(weights or [len(prompts) for prompts in sets])
        self._orders = [
            EpochOrder(len(prompts), seed=seed, set_number=number, shuffle=shuffle)
            for number, prompts in enumerate(sets)
        ]
        self._position = position
        self._pending = deque(sorted(pending))
        self._lock = threading.Lock()
        self._skipped: deque[Skipped] = deque()
        self.file_names = [one.environment for one in sets if one.environment]
        if len(sets) > 1 and not self.file_names:
            self.file_names = short_names([one.path.partition(" (split ")[0] for one in sets])
        for prompts, weight in zip(sets, self._interleaving.weights, strict=True):
            fraction = 100 * weight / self._interleaving.period
            logger.info("%s: %d rows, %.3g %% of the draws", prompts.path, len(prompts), fraction)

    @property
    def position(self) -> int:
        """Index of the next prompt that was never returned. Prompts of ``pending`` come before it."""
        return self._position

    def file_of(self, index: int) -> str:
        """The name of a prompt's environment or file, or an empty string if the run has only one."""
        return self.file_names[self._interleaving.at(index).set] if self.file_names else ""

    def row_of(self, index: int) -> str:
        """Where a prompt's row is in the data, such as ``train.jsonl:8``."""
        number, draw = self._interleaving.at(index)
        return self.sets[number].where(self._orders[number].row(draw))

    def environment_of(self, index: int) -> str:
        """The name of a prompt's environment, or an empty string if environments have no names."""
        return self._set_of(index).environment

    def next(self) -> Prompt:
        """Returns the next usable prompt. The others are reported by :meth:`take_skipped`.

        Raises ``ValueError`` if a set has no usable prompt, or a pending prompt cannot be used.
        """
        with self._lock:
            if self._pending:
                prompt = self._prompt_at(self._pending[0])
                self._pending.popleft()
                return prompt
            while True:
                index = self._position
                self._position += 1
                prompts = self._set_of(index)
                try:
                    prompt = self._prompt(index)
                except RowError as error:
                    self._skipped.append(Skipped(index, "unusable", prompts.path, str(error)))
                    continue
                if prompt is not None:
                    return prompt
                reason = prompts.too_long_reason
                self._skipped.append(Skipped(index, "too long", prompts.path, reason))

    def take_skipped(self) -> Iterator[Skipped]:
        """Yields the prompts left out since the last call. Other threads may call :meth:`next` meanwhile."""
        while self._skipped:
            yield self._skipped.popleft()

    def prompt_at(self, index: int) -> Prompt:
        """Returns prompt ``index`` once more, if it was returned earlier and is not in ``pending``."""
        with self._lock:
            return self._prompt_at(index)

    def close(self) -> None:
        with self._lock:
            for prompts in self.sets:
                prompts.close()

    def _prompt_at(self, index: int) -> Prompt:
        prompt = self._prompt(index)
        if prompt is None:
            raise ValueError(
                f"Prompt {index} was used before this run was resumed, but it is now longer than "
                f"the maximum of {self._set_of(index).limits.max_tokens} tokens "
                "(prompts.max_prompt_tokens). Resume with the same [prompts], training.seq_len and "
                "rollout.max_new_tokens as the checkpoint."
            )
        return prompt

    def _set_of(self, index: int) -> PromptSet:
        return self.sets[self._interleaving.at(index).set]

    def _prompt(self, index: int) -> Prompt | None:
        number, draw = self._interleaving.at(index)
        prompts = self.sets[number]
        try:
            prompt = prompts.prompt(self._orders[number].row(draw), index)
        except RowError:
            if prompts.none_usable:
                raise prompts.none_usable_error() from None
            raise
        if prompt is None and prompts.none_usable:
            raise prompts.none_usable_error()
        return prompt


def _check_pending(pending: Sequence[int], position: int) -> None:
    for index in pending:
        if not 0 <= index < position:
            raise ValueError(
                f"Pending prompts must have indices from 0 to below the stream's position "
                f"{position}, got {index}. The checkpoint does not belong to this run."
            )
    if len(set(pending)) < len(pending):
        raise ValueError(f"Each pending prompt must be listed once, got {sorted(pending)}.")
