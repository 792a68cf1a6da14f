# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Orders the prompts of a batch so that those with the longest answers start first.

A batch is finished when its last answer is finished. A long answer that starts last is
generated alone, while the servers have nothing else to do. If it starts first, short answers
run beside it (Graham's longest-processing-time rule).

The stream of prompts is divided into windows of one batch. Every prompt of a window is
returned before any prompt of the next window. No prompt moves out of its batch, so the set of
prompts that a run has seen after a number of batches does not depend on the predictions.
"""

import heapq
from collections.abc import Callable

from torchtitan.grpo.types import Prompt


class LongestFirst:
    """Sorts the prompts of each window by predicted length. It does bookkeeping only.

    The caller repeats::

        while (prompt := order.pop()) is None:
            order.push(next(prompts))

    Example: with windows of 3, prompts 0 to 5 with predicted lengths 5, 9, 7, 1, 2, 8 are
    returned in the order 1, 2, 0, 5, 4, 3.

    Args:
        window: Number of prompts in a batch, ``grpo.prompts_per_step``.
        predict: Returns the expected length of a prompt's answers. It is called once per prompt,
            in :meth:`push`.
        longest_first: ``rollout.longest_first``. ``False`` keeps the order of the stream.
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
        """Number of prompts that were pushed and not popped."""
        return len(self._coming) + len(self._ready)

    def push(self, prompt: Prompt) -> None:
        """Adds the next prompt of the stream."""
        assert len(self._ready) == 0, "all prompts of the previous window must be popped first"
        # The number breaks ties: prompts of equal length keep their order.
        self._coming.append((-self._predict(prompt), self._num_pushed, prompt))
        self._num_pushed += 1
        if len(self._coming) == self._window:
            self._ready, self._coming = self._coming, []
            heapq.heapify(self._ready)

    def pop(self) -> Prompt | None:
        """Returns the next prompt to start, or ``None`` while its window is incomplete."""
        return heapq.heappop(self._ready)[2] if self._ready else None
