# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prompts without end: shuffled, mixed, and exactly resumable.

Invariants:

- A prompt's index names a set, an epoch of it and a row, from the settings, the sizes of the
  sets and the seed alone; nothing that was drawn before matters.
- A stream hands out ``pending``, in ascending order, then all indices from ``position`` on,
  without those of prompts that are too long. So a stream that is given what another one has
  handed out and nobody has used up, and where that one stands, goes on exactly.
"""

import threading
from collections import deque
from collections.abc import Sequence

from torchtitan.grpo.rollout.prompts.epoch_order import EpochOrder
from torchtitan.grpo.rollout.prompts.mixture import PromptMixture
from torchtitan.grpo.rollout.prompts.prompt_set import PromptSet
from torchtitan.grpo.types import Prompt


class PromptStream:
    """Epoch after epoch of each set, in permutations given by the seed.

    Safe to use from several threads.

    Args:
        prompts: The set, or several.
        seed: ``debug.seed``.
        shuffle: ``prompts.shuffle``.
        position: Index of the first row to look at. Indices count rows, those left out
            included.
        pending: Indices before ``position`` that were handed out and not used up; they come
            first.

    Attributes:
        num_too_long: Prompts left out until now.

    Raises:
        ValueError: ``pending`` are not distinct indices before ``position``.
    """

    def __init__(
        self,
        prompts: PromptSet | PromptMixture,
        *,
        seed: int,
        shuffle: bool,
        position: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        _check_pending(pending, position)
        self._mixture = PromptMixture([prompts]) if isinstance(prompts, PromptSet) else prompts
        self._orders = [
            EpochOrder(len(one), seed=seed, set_number=number, shuffle=shuffle)
            for number, one in enumerate(self._mixture.sets)
        ]
        self._position = position
        self._pending = deque(sorted(pending))
        self._lock = threading.Lock()
        self.num_too_long = 0

    @property
    def position(self) -> int:
        """Index of the next row to look at, behind those of ``pending``."""
        return self._position

    def next(self) -> Prompt:
        """The next prompt that is short enough.

        Raises:
            ValueError: A row is bad, a set holds no prompt short enough, or a pending prompt is
                too long.
        """
        with self._lock:
            if self._pending:
                prompt = self._prompt_at(self._pending[0])
                self._pending.popleft()
                return prompt
            while True:
                index = self._position
                self._position += 1
                prompt = self._prompt(index)
                if prompt is not None:
                    return prompt
                self.num_too_long += 1

    def prompt_at(self, index: int) -> Prompt:
        """A prompt that was handed out before, and is not among ``pending``.

        Raises:
            ValueError: Its row is bad or too long.
        """
        with self._lock:
            return self._prompt_at(index)

    def close(self) -> None:
        """Lets go of the sets."""
        with self._lock:
            self._mixture.close()

    def _prompt_at(self, index: int) -> Prompt:
        prompt = self._prompt(index)
        if prompt is None:
            raise ValueError(
                f"Prompt {index} was handed out before, so it was at most "
                "prompts.max_prompt_tokens long, and now it is longer than that: "
                f"{self._mixture.sets[self._mixture.interleaving.at(index).set].max_tokens} "
                "tokens. Resume with the [prompts], training.seq_len and rollout.max_new_tokens "
                "that the checkpoint was written with."
            )
        return prompt

    def _prompt(self, index: int) -> Prompt | None:
        number, draw = self._mixture.interleaving.at(index)
        prompts = self._mixture.sets[number]
        prompt = prompts.prompt(self._orders[number].row(draw), index)
        if prompt is None and prompts.none_fits:
            raise prompts.none_fits_error()
        return prompt


def _check_pending(pending: Sequence[int], position: int) -> None:
    for index in pending:
        if not 0 <= index < position:
            raise ValueError(
                f"Pending prompts are before the stream's position, {position}, got {index}. The "
                "checkpoint is not of a run of this kind."
            )
    if len(set(pending)) < len(pending):
        raise ValueError(f"Each prompt is pending once, got {sorted(pending)}.")
