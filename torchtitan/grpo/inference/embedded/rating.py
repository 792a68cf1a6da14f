# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rates the prompts of several requests in few forward passes.

A pass over one short sequence takes hardly less time than a pass over many. Sequences are therefore
sorted by length, put side by side, and padded on the right, where a causal mask hides the padding from
all real tokens. A pass has a bounded number of tokens, its padding included, unless one sequence alone
is longer.
"""

from collections.abc import Sequence

from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request


class RatingQueue:
    """Requests whose prompts are to be rated.

    Args:
        runner: The model.
        max_tokens: Maximum number of tokens of a pass.

    Attributes:
        waiting: Requests whose prompts are not rated yet.
    """

    def __init__(self, runner: ModelRunner, max_tokens: int) -> None:
        self._runner = runner
        self._max_tokens = max_tokens
        self.waiting: list[Request] = []

    def rate(self) -> list[Request]:
        """Sets ``rating`` of all that wait; returns them."""
        requests = self.waiting
        for chosen in padded_batches([len(r.prompt_ids) for r in requests], self._max_tokens):
            most = max(requests[i].num_top for i in chosen)
            found = self._runner.rate([requests[i].prompt_ids for i in chosen], most)
            for i, rating in zip(chosen, found, strict=True):
                requests[i].rating = rating
        self.waiting = []
        return requests


def padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Splits sequences into batches of similar lengths; returns the indices of each batch.

    ``padded_batches([2, 6, 3], 8)`` is ``[[0, 2], [1]]``: the first two are padded to 3 tokens each,
    and a third one of 6 would make 18.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # The lengths ascend, so that this one is the length of its whole batch.
        if batches and (len(batches[-1]) + 1) * lengths[i] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
