# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""In which order the prompts of a batch are started: those with the longest answers first.

A batch is finished when its last answer is. Long answers that are started last are then
written alone, on servers that have nothing else to do; started first, they are written while
the short ones come and go (Graham's longest-processing-time rule).

The stream of prompts is cut into windows of one batch. Every prompt of a window is handed out
before any of the next one, so none moves further than within its batch, and which prompts a
run has seen after so many batches does not depend on the predictions.
"""

import heapq
from collections.abc import Callable

from torchtitan.grpo.types import Prompt


class LongestFirst:
    """Pure bookkeeping. Whoever starts groups calls, each time::

        while (prompt := order.pop()) is None:
            order.push(next(prompts))

    Example: windows of 3; prompts 0 to 5 come in with predicted lengths 5, 9, 7, 1, 2, 8. They
    are handed out as 1, 2, 0, then 5, 4, 3.

    Args:
        window: Prompts of a batch, ``grpo.prompts_per_step``.
        predict: Expected length of a prompt's answers; asked once for each, as it comes in.
        longest_first: ``rollout.longest_first``. False hands prompts out as they come in.
    """

    def __init__(
        self, window: int, predict: Callable[[Prompt], float], *, longest_first: bool = True
    ) -> None:
        self._window = window if longest_first else 1
        self._predict = predict if longest_first else (lambda prompt: 0.0)
        self._num_pushed = 0
        self._coming: list[tuple[float, int, Prompt]] = []
        self._ready: list[tuple[float, int, Prompt]] = []

    def __len__(self) -> int:
        """Prompts that were pushed and not popped."""
        return len(self._coming) + len(self._ready)

    def push(self, prompt: Prompt) -> None:
        """The next prompt of the stream."""
        assert len(self._ready) == 0, "the window before must be handed out first"
        # The number tells prompts of equal length apart: they keep their order.
        self._coming.append((-self._predict(prompt), self._num_pushed, prompt))
        self._num_pushed += 1
        if len(self._coming) == self._window:
            self._ready, self._coming = self._coming, []
            heapq.heapify(self._ready)

    def pop(self) -> Prompt | None:
        """The prompt to start next; None where its window is not complete: push more."""
        return heapq.heappop(self._ready)[2] if self._ready else None
