# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups come out of their frames as they went in, rated or not."""

import numpy as np

from torchtitan.grpo.rollout.group_frames import pack_groups, unpack_groups, without_arrays
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

PROMPT = np.array([5, 6], np.int32)


def rollout(length: int, rating: list[float] | None) -> Rollout:
    return Rollout(
        PROMPT,
        np.arange(length, dtype=np.int32),
        -np.arange(length, dtype=np.float32),
        (VersionSegment(0, 0, length),),
        "stop",
        "text",
        0.5,
        teacher_logprobs=None if rating is None else np.array(rating, np.float32),
    )


GROUPS = [
    RolloutGroup(0, "a", (rollout(2, [-0.5, -1.5]), rollout(3, None)), ""),
    RolloutGroup(1, "b", (rollout(1, [-2.5]),), ""),
]


def ratings(groups: list[RolloutGroup]) -> list[list[float] | None]:
    rollouts = [r for group in groups for r in group.rollouts]
    return [None if r.teacher_logprobs is None else r.teacher_logprobs.tolist() for r in rollouts]


def test_ratings_stay_with_their_rollouts():
    found = unpack_groups(*pack_groups(GROUPS))
    assert ratings(found) == [[-0.5, -1.5], None, [-2.5]]
    assert [r.completion_ids.tolist() for r in found[0].rollouts] == [[0, 1], [0, 1, 2]]


def test_without_arrays_it_is_still_known_what_was_rated():
    headers, frames = pack_groups(GROUPS)
    found = unpack_groups(headers, without_arrays(frames), has_arrays=False)
    assert ratings(found) == [[0.0, 0.0], None, [0.0]]


def test_frames_of_an_earlier_release_have_no_ratings():
    headers, frames = pack_groups([RolloutGroup(0, "a", (rollout(2, None),), "")])
    assert ratings(unpack_groups(headers, frames[:4])) == [None]
