# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets sequences of a row share the context with which they begin, so that it is computed once.

All completions of a group begin with the same prompt, and rows of an episode often begin with the
same turns. In a causal model, what a token computes depends only on the tokens before it, so that
equal beginnings have equal keys, values and gradients, which only have to be summed.

The contexts of a group form a radix tree. A node is a *span*: consecutive tokens of a row. A
span is visible to itself and to its subtree, which follows it in the row (depth first). The
context of a sequence is its prompt without the last token: from that token on, a position predicts
what only this sequence has.

    prompt 5 6 9, completions 7 8 and 1:     5 6 | 9 7 8 | 9 1
    positions                                0 1   2 3 4   2 3
    reach (the end of the subtree)           7 7   5 5 5   7 7

The functions are pure. `layout.py` chooses which sequences share a row, and `rows.py` writes the row.
Only sequences with the same ``Sample.group`` share contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchtitan.grpo.data.cost import SequenceCost
from torchtitan.grpo.models.tree_attention import MAX_LEVELS

NO_GROUP = -1
"""Group of a sequence that shares nothing."""


class _HasPrompt(Protocol):
    """The attributes of :class:`~torchtitan.grpo.data.rows.Sample` that are needed here."""

    @property
    def prompt_ids(self) -> np.ndarray: ...
    @property
    def group(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a row.

    Attributes:
        sequence: Index of a sequence that has these tokens.
        begin: Position of the first token in the sequence.
        end: Position behind the last token.
        reach: Number of tokens from the span's first token to the end of its subtree in the row.
        is_context: Whether several sequences have the tokens; if not, they end one.
    """

    sequence: int
    begin: int
    end: int
    reach: int
    is_context: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


def spans_of(sequences: Sequence[_HasPrompt]) -> list[Span]:
    """Returns the spans of a row with these sequences, in their order in the row."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        # One that shares nothing is a group by itself, with a key that no group has.
        key = sequence.group if sequence.group != NO_GROUP else -2 - index
        groups.setdefault(key, []).append(index)
    # Sequences of a group usually have one prompt as the same array, which need not be compared.
    cut = {id(s.prompt_ids): s.prompt_ids[:-1] for s in sequences}
    contexts = [cut[id(sequence.prompt_ids)] for sequence in sequences]
    return [
        span for members in groups.values() for span in _subtree(sequences, contexts, members, 0)
    ]


def num_computed(spans: Sequence[Span]) -> int:
    return sum(span.num_tokens for span in spans)


def cost_of(spans: Sequence[Span], cost: SequenceCost) -> float:
    # All tokens before a position are seen from it, whether they are shared or not.
    return sum(cost(span.num_tokens, span.begin) for span in spans)


def _subtree(
    sequences: Sequence[_HasPrompt],
    contexts: Sequence[np.ndarray],
    members: Sequence[int],
    begin: int,
    depth: int = 0,
) -> list[Span]:
    """Returns the spans, from position ``begin`` on, of sequences whose tokens agree before ``begin``.

    ``depth`` counts the contexts above these spans. At the greatest depth, nothing more is shared.
    """
    if len(members) == 1 or depth == MAX_LEVELS:
        lengths = {member: sequences[member].num_tokens for member in members}
        return [Span(m, begin, end, end - begin, is_context=False) for m, end in lengths.items()]
    end = _common_end([contexts[member] for member in members], begin)
    below = [
        span
        for branch in _branches(contexts, members, end)
        for span in _subtree(sequences, contexts, branch, end, depth + (end > begin))
    ]
    if end == begin:
        return below
    reach = end - begin + num_computed(below)
    return [Span(members[0], begin, end, reach, is_context=True), *below]


def _common_end(contexts: Sequence[np.ndarray], begin: int) -> int:
    """Returns the length of the contexts' common prefix. The contexts are known to agree before ``begin``."""
    first, end = contexts[0], min(len(context) for context in contexts)
    for context in contexts[1:]:
        if context is not first:
            differs = context[begin:end] != first[begin:end]
            end = begin + int(differs.argmax()) if differs.any() else end
    return end


def _branches(contexts: Sequence[np.ndarray], members: Sequence[int], end: int) -> list[list[int]]:
    """Groups members by the token at ``end`` in their contexts; one whose context ends there stays alone."""
    branches: dict[int, list[int]] = {}
    for member in members:
        context = contexts[member]
        key = int(context[end]) if len(context) > end else -1 - member
        branches.setdefault(key, []).append(member)
    return list(branches.values())
