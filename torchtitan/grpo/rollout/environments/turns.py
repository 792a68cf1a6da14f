# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Splits a completion into turns of the model and observations of the environment.

Example: the model writes ``3 * 4 =``, the environment ``1 2``, the model ``. <eos>``::

    token_ids   3 * 4 = 1 2 . <eos>
    sampled     1 1 1 1 0 0 1 1
    turns       [3 * 4 =] observed [1 2], [. <eos>]

Turns can be recovered from the tokens: a turn ends with each stop token, because no server
generates past one, and before each token that was not sampled. The functions here are pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.types import Generation, VersionSegment


@dataclass(frozen=True)
class Turn:
    """The tokens of one turn and of the observation after it.

    Attributes:
        token_ids: Tokens that the model wrote.
        observed: Tokens of the observation after them. The last turn may have none yet.
    """

    token_ids: list[int]
    observed: list[int]


def turns_of(generation: Generation, stop_token_ids: Collection[int]) -> list[Turn]:
    """Returns the turns of a completion; the last one may lack its stop token."""
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
    """Returns the number of turns, including one that is still being written."""
    return 0 if generation is None else len(turns_of(generation, stop_token_ids))


def observed(token_ids: Sequence[int], version: int, *, begins_row: bool = False) -> Generation:
    """Returns the tokens of an observation as a part of a completion that is not trained on.

    Args:
        token_ids: Token ids of the observation, at least one.
        version: Policy version of the tokens before the observation. It is recorded for the
            observation too.
        begins_row: Whether the tokens are the whole context of the next turn; see `types.NewRows`.
    """
    length = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(length, np.float32),
        finish_reason="length",
        segments=(VersionSegment(version, 0, length),),
        sampled=np.zeros(length, np.bool_),
        new_rows=((0, length),) if begins_row else (),
    )
