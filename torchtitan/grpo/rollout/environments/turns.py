# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A completion as turns of the model and observations of the environment. Pure.

Example: the model writes ``3 * 4 =``, the environment ``1 2``, the model ``. <eos>``::

    token_ids   3 * 4 = 1 2 . <eos>
    sampled     1 1 1 1 0 0 1 1
    turns       [3 * 4 =] observed [1 2], [. <eos>]

Turns can be read back from the tokens: one ends where tokens that were not sampled begin, and
with each stop token, since no server writes on after one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.types import Generation, VersionSegment


@dataclass(frozen=True)
class Turn:
    """What the model wrote, and what was observed after it: nothing yet after the last."""

    token_ids: list[int]
    observed: list[int]


def turns_of(generation: Generation, stop_token_ids: Collection[int]) -> list[Turn]:
    """The turns of a completion that ends with one, whether or not with a stop token."""
    ids = generation.token_ids.tolist()
    sampled = [True] * len(ids) if generation.sampled is None else generation.sampled.tolist()
    turns: list[Turn] = []
    is_open = False
    for token, is_sampled in zip(ids, sampled, strict=True):
        if is_sampled:
            if not is_open:
                turns.append(Turn([], []))
            turns[-1].token_ids.append(token)
            is_open = token not in stop_token_ids
        else:
            turns[-1].observed.append(token)
            is_open = False
    return turns


def num_turns(generation: Generation | None, stop_token_ids: Collection[int]) -> int:
    """Turns that are there, the one under way included."""
    return 0 if generation is None else len(turns_of(generation, stop_token_ids))


def observed(token_ids: Sequence[int], version: int) -> Generation:
    """Tokens of an observation as a part of a completion.

    Args:
        token_ids: At least one.
        version: Of the tokens before them: they were read under it, and age with it.
    """
    length = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(length, np.float32),
        finish_reason="length",
        segments=(VersionSegment(version, 0, length),),
        sampled=np.zeros(length, np.bool_),
    )
