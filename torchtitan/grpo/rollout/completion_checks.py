# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rules for every completion that is trained on, whether a server or a file brought it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchtitan.grpo.inference.answers import (
    LOWEST_LOGPROB,
    LOWEST_SAMPLED_LOGPROB,
    UNPUSHED_VERSION,
    first_bad_logprob,
    logprob_rule,
)
from torchtitan.grpo.types import NewRows, TopTokens, VersionSegment


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
    """Returns what is wrong with a completion, as the rest of a sentence; see :class:`Generation`."""
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


def length_problem(
    num_prompt: int, num_completion: int, new_rows: NewRows, row_len: int
) -> str | None:
    """Returns that a completion does not fit in a row of ``training.seq_len``, or None if it does."""
    longest = longest_sequence(num_prompt, num_completion, new_rows)
    if longest <= row_len:
        return None
    return f"prompt and completion must have at most training.seq_len ({row_len}) tokens, got {longest}"


def longest_sequence(num_prompt: int, num_completion: int, new_rows: NewRows) -> int:
    """Returns the number of tokens of the longest sequence of a rollout."""
    borders = [0, *(start for start, _ in new_rows), num_completion]
    lengths = [end - start for start, end in pairwise(borders)]
    return max(num_prompt + lengths[0], *lengths[1:], 0)


def rating_problem(
    logprobs: np.ndarray | None, top: TopTokens | None, num_tokens: int, vocab_size: int
) -> str | None:
    """Returns what is wrong with a teacher's rating of a completion of ``num_tokens`` tokens."""
    if logprobs is not None and len(logprobs) != num_tokens:
        return (
            f"each of the {num_tokens} completion tokens must have a teacher's logprob, got "
            f"{len(logprobs)}"
        )
    rule = logprob_rule(LOWEST_LOGPROB)
    if logprobs is not None and (bad := first_bad_logprob(logprobs, LOWEST_LOGPROB)) is not None:
        return f"teacher_logprobs {rule}, got {logprobs[bad]} at token {bad}"
    if top is None:
        return None
    if not len(top.ids) == len(top.logprobs) == num_tokens:
        return f"teacher_top must hold k ids and k logprobs for each of the {num_tokens} completion tokens"
    if not ((top.ids >= 0) & (top.ids < vocab_size)).all():
        return f"the ids of teacher_top must be in [0, {vocab_size}), the model's vocabulary"
    if (np.diff(np.sort(top.ids, axis=1), axis=1) == 0).any():
        return "the ids of teacher_top must be different at each token"
    if (bad := first_bad_logprob(top.logprobs.ravel(), LOWEST_LOGPROB)) is not None:
        found = top.logprobs.ravel()[bad]
        return f"the logprobs of teacher_top {rule}, got {found} at token {bad // top.ids.shape[1]}"
    return None


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
