# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks for every completion that is trained on, whether it came from a server or from a file."""

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
from torchtitan.grpo.rewards.reward_calls import LARGEST_REWARD
from torchtitan.grpo.types import Generation, NewRows, Rollout, VersionSegment, columns_of


def rollout_problem(rollout: Rollout, *, vocab_size: int, row_len: int) -> str | None:
    """Returns what is wrong with a rollout, as a clause for an error message, or None."""
    prompt = rollout.prompt_ids
    if not (len(prompt) and prompt.min() >= 0 and prompt.max() < vocab_size):
        return f"the prompt must have token ids in [0, {vocab_size}), the model's vocabulary"
    return (
        completion_problem(rollout, vocab_size)
        or length_problem(len(prompt), rollout, row_len)
        or _rating_problem(rollout, vocab_size)
        or reward_problem([rollout.reward, *rollout.reward_components.values()])
    )


def reward_problem(rewards: Sequence[float | None]) -> str | None:
    if all(abs(reward) <= LARGEST_REWARD for reward in rewards if reward is not None):
        return None
    return (
        f"rewards must be numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, got {rewards}"
    )


def completion_problem(one: Generation, vocab_size: int) -> str | None:
    """Returns what is wrong with a completion, as a clause for an error message, or None."""
    ids, num_tokens = one.token_ids, len(one.token_ids)
    if num_tokens == 0:
        return "it has no token"
    if not (ids.min() >= 0 and ids.max() < vocab_size):
        return f"its token ids are {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}"
    for name, column in columns_of(type(one)).items():
        values = getattr(one, name)
        if values is not None and (len(values), values.ndim) != (num_tokens, 1 + column.is_list):
            return (
                f"its {len(values)} {name} are not one for each of {num_tokens} completion tokens"
            )
    if (bad := first_bad_logprob(one.logprobs, LOWEST_SAMPLED_LOGPROB)) is not None:
        rule = logprob_rule(LOWEST_SAMPLED_LOGPROB)
        return f"its logprobs {rule}, got {one.logprobs[bad]} at token {bad}"
    if not _cover(one.segments, num_tokens):
        return f"its version segments {list(one.segments)!s:.300} do not cover {num_tokens} tokens"
    num_inserted = num_tokens - one.num_trained
    if not 0 <= one.num_context <= num_inserted:
        return f"num_context must be in [0, {num_inserted}], got {one.num_context}"
    return _new_rows_problem(one.new_rows, num_tokens)


def length_problem(num_prompt: int, one: Generation, row_len: int) -> str | None:
    longest = longest_sequence(num_prompt, len(one.token_ids), one.new_rows)
    if longest <= row_len:
        return None
    return (
        f"prompt and completion must have at most training.seq_len ({row_len}) tokens, got {longest}; "
        "raise training.seq_len"
    )


def longest_sequence(num_prompt: int, num_completion: int, new_rows: NewRows) -> int:
    """The length in tokens of a rollout's longest training row. Each of ``new_rows`` begins a row."""
    borders = [0, *(start for start, _ in new_rows), num_completion]
    lengths = [end - start for start, end in pairwise(borders)]
    return max(num_prompt + lengths[0], *lengths[1:], 0)


def _rating_problem(rollout: Rollout, vocab_size: int) -> str | None:
    rating, rule = rollout.teacher_logprobs, logprob_rule(LOWEST_LOGPROB)
    if rating is not None and (bad := first_bad_logprob(rating, LOWEST_LOGPROB)) is not None:
        return f"teacher_logprobs {rule}, got {rating[bad]} at token {bad}"
    ids, logprobs = rollout.teacher_top_ids, rollout.teacher_top_logprobs
    if ids is None and logprobs is None:
        return None
    if ids is None or logprobs is None or ids.shape != logprobs.shape or not ids.shape[1]:
        return (
            "teacher_top_ids and teacher_top_logprobs must have equally many values, at least one, at "
            "each token"
        )
    if not ((ids >= 0) & (ids < vocab_size)).all():
        return f"teacher_top_ids must be in [0, {vocab_size}), the model's vocabulary"
    if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        return "teacher_top_ids must be different at each token"
    if (bad := first_bad_logprob(logprobs.ravel(), LOWEST_LOGPROB)) is not None:
        found = logprobs.ravel()[bad]
        return f"teacher_top_logprobs {rule}, got {found} at token {bad // ids.shape[1]}"
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
    # Only the first row may begin with the completion: nothing then follows the prompt.
    if not new_rows or all(a < b for a, b in pairwise([-1, *borders, num_tokens])):
        return None
    return (
        f"new_rows must be ascending places (start, num_context) within the {num_tokens} completion "
        f"tokens, each with tokens before and behind its context, got {list(new_rows)}"
    )
