# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What holds of every completion that is trained on, whether a server or a file brought it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchtitan.grpo.inference.answers import UNPUSHED_VERSION
from torchtitan.grpo.inference.logprob_bounds import (
    LOWEST_SAMPLED_LOGPROB,
    first_bad_logprob,
    logprob_rule,
)
from torchtitan.grpo.types import NewRows, VersionSegment


def completion_problem(
    ids: np.ndarray,
    logprobs: np.ndarray,
    segments: Sequence[VersionSegment],
    *,
    vocab_size: int,
    sampled: np.ndarray | None = None,
    num_context: int = 0,
    new_rows: NewRows = (),
) -> str | None:
    """Returns what is wrong with a completion, as the rest of a sentence, or None.

    See :class:`Generation` for the other arguments.

    Args:
        ids: [tokens] int, at least one.
        vocab_size: Of the model.
    """
    num_tokens = len(ids)
    num_inserted = 0 if sampled is None else num_tokens - int(np.count_nonzero(sampled))
    if num_tokens == 0:
        return "it has no token"
    if not (ids.min() >= 0 and ids.max() < vocab_size):
        return f"its token ids are {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}"
    if len(logprobs) != num_tokens:
        return (
            f"its {len(logprobs)} logprobs are not one for each of {num_tokens} completion tokens"
        )
    if (bad := first_bad_logprob(logprobs, LOWEST_SAMPLED_LOGPROB)) is not None:
        rule = logprob_rule(LOWEST_SAMPLED_LOGPROB)
        return f"its logprobs {rule}, got {logprobs[bad]} at token {bad}"
    if not _cover(segments, num_tokens):
        return f"its version segments {list(segments)!s:.300} do not cover {num_tokens} tokens"
    if sampled is not None and len(sampled) != num_tokens:
        return f"its mask of sampled tokens has {len(sampled)} entries for {num_tokens} tokens"
    if not 0 <= num_context <= num_inserted:
        return f"num_context must be in [0, {num_inserted}], got {num_context}"
    return _new_rows_problem(new_rows, num_tokens)


def _cover(segments: Sequence[VersionSegment], num_tokens: int) -> bool:
    borders = [0, *(segment.end for segment in segments)]
    return (
        borders[-1] == num_tokens
        and all(start < end for start, end in pairwise(borders))
        and all(s.start == start for s, start in zip(segments, borders, strict=False))
        and all(segment.version >= UNPUSHED_VERSION for segment in segments)
    )


def _new_rows_problem(new_rows: NewRows, num_tokens: int) -> str | None:
    borders = [border for start, n in new_rows for border in (start, start + n)]
    if not new_rows or all(a < b for a, b in pairwise([0, *borders, num_tokens])):
        return None
    return (
        f"new_rows must be ascending places (start, num_context) within the {num_tokens} completion "
        f"tokens, each with tokens before and behind its context, got {list(new_rows)}"
    )
