# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups come out of their frames as they went in, rated or not."""

import numpy as np

from torchtitan.grpo.rollout.group_frames import pack_groups, unpack_groups, without_arrays
from torchtitan.grpo.types import Rollout, RolloutGroup, TopTokens, VersionSegment

PROMPT = np.array([5, 6], np.int32)


def top_tokens(length: int, k: int) -> TopTokens:
    ids = np.arange(length * k, dtype=np.int32).reshape(length, k)
    return TopTokens(ids, -0.5 - ids.astype(np.float32))


def rollout(length: int, rating: list[float] | None, num_top: int = 0) -> Rollout:
    return Rollout(
        prompt_ids=PROMPT,
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=-np.arange(length, dtype=np.float32),
        segments=(VersionSegment(0, 0, length),),
        finish_reason="stop",
        completion="text",
        reward=0.5,
        teacher_logprobs=None if rating is None else np.array(rating, np.float32),
        teacher_top=top_tokens(length, num_top) if num_top else None,
    )


GROUPS = [
    RolloutGroup(0, "a", (rollout(2, [-0.5, -1.5]), rollout(3, None)), "", file="easy"),
    RolloutGroup(1, "b", (rollout(1, [-2.5]),), ""),
]


def ratings(groups: list[RolloutGroup]) -> list[list[float] | None]:
    rollouts = [r for group in groups for r in group.rollouts]
    return [None if r.teacher_logprobs is None else r.teacher_logprobs.tolist() for r in rollouts]


def test_ratings_stay_with_their_rollouts():
    found = unpack_groups(*pack_groups(GROUPS))
    assert ratings(found) == [[-0.5, -1.5], None, [-2.5]]
    assert [r.token_ids.tolist() for r in found[0].rollouts] == [[0, 1], [0, 1, 2]]


def test_without_arrays_it_is_still_known_what_was_rated():
    headers, frames = pack_groups(GROUPS)
    found = unpack_groups(headers, without_arrays(frames), has_arrays=False)
    assert ratings(found) == [[0.0, 0.0], None, [0.0]]


def test_frames_of_an_earlier_release_have_no_ratings():
    headers, frames = pack_groups([RolloutGroup(0, "a", (rollout(2, None),), "")])
    assert ratings(unpack_groups(headers, frames[:4])) == [None]
    headers, frames = pack_groups(GROUPS)
    assert ratings(unpack_groups(headers, frames[:5])) == [[-0.5, -1.5], None, [-2.5]]


TOP_GROUPS = [
    RolloutGroup(0, "a", (rollout(2, [-0.5, -1.5], 3), rollout(3, None)), ""),
    RolloutGroup(1, "b", (rollout(1, [-2.5], 2),), ""),
]


def test_the_most_likely_tokens_stay_with_their_rollouts():
    found = [r for group in unpack_groups(*pack_groups(TOP_GROUPS)) for r in group.rollouts]
    assert [r.teacher_top is None for r in found] == [False, True, False]
    for r, length, k in ((found[0], 2, 3), (found[2], 1, 2)):
        top, sent = r.teacher_top, top_tokens(length, k)
        assert (top.ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(top.ids, sent.ids)
        np.testing.assert_array_equal(top.logprobs, sent.logprobs)


def test_each_token_takes_8_bytes_for_each_of_its_most_likely_tokens():
    _, with_top = pack_groups([RolloutGroup(0, "a", (rollout(10, [-1.0] * 10, 32),), "")])
    _, without = pack_groups([RolloutGroup(0, "a", (rollout(10, [-1.0] * 10),), "")])
    assert sum(map(len, with_top)) - sum(map(len, without)) == 10 * 256


def test_without_arrays_the_most_likely_tokens_have_their_shape_and_take_no_memory():
    headers, frames = pack_groups(TOP_GROUPS)
    (first, _), (last,) = (
        g.rollouts for g in unpack_groups(headers, without_arrays(frames), has_arrays=False)
    )
    for top, shape in ((first.teacher_top, (2, 3)), (last.teacher_top, (1, 2))):
        assert top.ids.shape == top.logprobs.shape == shape
        assert top.ids.strides == (0, 0)
        assert not top.logprobs.any()
