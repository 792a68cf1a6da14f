# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Joins the parts of one completion."""

from dataclasses import replace

import numpy as np

from torchtitan.grpo.types import Generation, VersionSegment, columns_of


def joined(before: Generation | None, after: Generation) -> Generation:
    """Joins two parts of one completion. Adjacent segments of the same version become one."""
    if before is None:
        return after
    offset = len(before.token_ids)
    segments = list(before.segments)
    for version, start, end in after.segments:
        moved = VersionSegment(version, start + offset, end + offset)
        if segments and segments[-1].version == version:
            moved = moved._replace(start=segments.pop().start)
        segments.append(moved)
    rewards = [r for r in (before.environment_reward, after.environment_reward) if r is not None]
    columns = {
        name: column.joined([(len(p.token_ids), getattr(p, name)) for p in (before, after)])
        for name, column in columns_of(Generation).items()
    }
    return replace(
        after,
        segments=tuple(segments),
        environment_reward=sum(rewards) if rewards else None,
        num_context=before.num_context + after.num_context,
        new_rows=(*before.new_rows, *((start + offset, n) for start, n in after.new_rows)),
        **columns,
    )


def as_context(part: Generation) -> Generation:
    """Returns the same tokens as context, which is not trained on."""
    return replace(
        part,
        logprobs=np.zeros_like(part.logprobs),
        sampled=np.zeros(len(part.token_ids), np.bool_),
        num_context=part.num_written,
    )
