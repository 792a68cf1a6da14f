# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From the tokens that a teacher finds most likely to those of them that the student has.

A teacher may have more tokens than the student: often its vocabulary is the same, and its model has
rows that no token uses. The student can write none of them, so that they belong to the outcome "any other
token", and the most likely ones of the student's vocabulary take their places.
"""

import numpy as np

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.types import TopTokens


def student_tokens(top: TopTokens, top_k: int, vocab_size: int, url: str) -> TopTokens:
    """Returns the ``top_k`` most likely tokens that the student has, the most likely one first.

    Args:
        top: The most likely tokens of the teacher, at least ``top_k`` at each place.
        top_k: ``teacher.top_k``.
        vocab_size: Vocabulary size of the student.
        url: Base URL of the teacher, for the message.

    Raises:
        ServerError: If a place has fewer tokens of the student.
    """
    logprobs = np.where(top.ids < vocab_size, top.logprobs, -np.inf)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :top_k]
    kept = np.take_along_axis(logprobs, order, axis=1)
    if kept.shape[1] < top_k or np.isneginf(kept).any():
        raise ServerError(
            f"{url}: the teacher must name {top_k} of the {vocab_size} tokens of the trained model at each "
            f"place (teacher.top_k), but the most likely ones that it named there are fewer."
        )
    return TopTokens(np.take_along_axis(top.ids, order, axis=1), kept)
