# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Joins the parts of one completion."""

from dataclasses import replace

import numpy as np

from torchtitan.grpo.types import Generation, VersionSegment


def joined(before: Generation | None, after: Generation) -> Generation:
    """Joins two parts of one completion.

    Adjacent segments of the same version become one segment.
    """
    if before is None:
        return after
    offset = len(before.token_ids)
    segments = list(before.segments)
    for segment in after.segments:
        moved = VersionSegment(segment.version, segment.start + offset, segment.end + offset)
        if segments and segments[-1].version == moved.version:
            moved = replace(moved, start=segments.pop().start)
        segments.append(moved)
    sampled = None
    if before.sampled is not None or after.sampled is not None:
        sampled = np.concatenate([_mask(before), _mask(after)])
    rewards = [r for r in (before.environment_reward, after.environment_reward) if r is not None]
    return Generation(
        token_ids=np.concatenate([before.token_ids, after.token_ids]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        finish_reason=after.finish_reason,
        segments=tuple(segments),
        sampled=sampled,
        environment_reward=sum(rewards) if rewards else None,
        num_context=before.num_context + after.num_context,
        new_rows=(*before.new_rows, *((start + offset, n) for start, n in after.new_rows)),
    )


def as_context(part: Generation) -> Generation:
    """Returns the same tokens as context, which is not trained on."""
    return replace(
        part,
        logprobs=np.zeros_like(part.logprobs),
        sampled=np.zeros(len(part.token_ids), np.bool_),
        num_context=part.num_written,
    )


def _mask(part: Generation) -> np.ndarray:
    return np.ones(len(part.token_ids), np.bool_) if part.sampled is None else part.sampled
