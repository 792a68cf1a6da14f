# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the cost of training on a sequence: its tokens, or the operations of the model.

In packed rows attention stays inside each sequence, so the cost of a row is the sum over its
spans (`shared_context.py`). Norms, softmax, rotary embeddings and recomputed activations are
left out, and so is the fact that the output layer computes trained tokens only: they change little
of one sequence's cost relative to another's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.grpo.models.families import family_of


class SequenceCost(Protocol):
    def __call__(self, num_tokens: int, num_before: int = 0) -> float:
        """Returns the cost of ``num_tokens`` tokens that follow ``num_before`` others in a sequence.

        The unit depends on the implementation.
        """
        ...


_TRAINING = 3
"""Products in forward and backward pass: the backward pass computes two for each forward one."""


def token_cost(num_tokens: int, num_before: int = 0) -> float:
    return float(num_tokens)


@dataclass(frozen=True)
class FlopsCost:
    """FLOPs of one forward and backward pass over all layers.

    ``per_token`` is for a token's products with weights, and ``per_pair`` for a pair of a query and a key in
    layers with full attention. ``windows`` holds (window size, FLOPs of a pair) of sliding-window layers.
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()

    def __call__(self, num_tokens: int, num_before: int = 0) -> float:
        pairs = num_tokens * (num_tokens + 1) / 2 + num_tokens * num_before
        cost = self.per_token * num_tokens + self.per_pair * pairs
        for window, per_pair in self.windows:
            cost += per_pair * (pairs - _beyond(window, num_before, num_before + num_tokens))
        return cost


def _beyond(window: int, begin: int, end: int) -> float:
    """Counts pairs of a query in [begin, end) and an earlier key that the query's window excludes."""
    first, last = max(begin - window, 0), max(end - window, 0)
    return (last * (last + 1) - first * (first + 1)) / 2


def flops_cost(config: Mapping[str, Any]) -> FlopsCost:
    """Returns the cost function for a ``config.json``. Only the experts that a token uses are counted."""
    layers = family_of(config).layers(config)
    weights = sum(layer.products for layer in layers) + config["hidden_size"] * config["vocab_size"]
    pairs = dict[int | None, int]()
    for layer in layers:
        row = layer.attention
        pairs[row.window] = pairs.get(row.window, 0) + row.pair_products
    # A multiplication is one operation and the addition of its result another.
    each = _TRAINING * 2.0
    windows = [(window, each * number) for window, number in pairs.items() if window is not None]
    return FlopsCost(each * weights, each * pairs.get(None, 0), tuple(windows))
