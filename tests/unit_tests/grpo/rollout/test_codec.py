# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from dataclasses import replace

import numpy as np
import pytest
from rollouts import assert_same, group

from torchtitan.grpo.rollout.codec import Packed, pack, pack_without_arrays, unpack
from torchtitan.grpo.types import (
    Column,
    Rollout,
    RolloutGroup,
    VersionSegment,
    columns_of,
    joined,
)

PROMPT = np.array([5, 6], np.int32)


def rollout(length: int, num_top: int = 0, *, has_mask: bool = False) -> Rollout:
    """A rollout with a value in each column, those of a teacher only with ``num_top``."""
    values = {}
    for name, column in columns_of(Rollout).items():
        if (name.startswith("teacher") and num_top == 0) or (name == "sampled" and not has_mask):
            continue
        count = length * num_top if column.is_list else length
        array = np.arange(count).astype(column.dtype)
        values[name] = array.reshape(length, -1) if column.is_list else array
    return Rollout(
        **values,
        segments=(VersionSegment(0, 0, 1), VersionSegment(1, 1, length)),
        finish_reason="stop",
        prompt_ids=PROMPT,
        completion="färbig",
        reward=1 / 3,
        reward_components={"exact": 1.0},
        num_context=1,
        new_rows=((1, 1),),
    )


GROUPS = [
    group(0, rollout(2, 3), rollout(3, has_mask=True), columns={"x": [1]}, file="easy"),
    group(1, *(rollout(5, 2),) * 2, server_url="http://a", is_chat=True),
]


def test_groups_keep_every_bit_and_share_their_prompts():
    found = unpack(pack(GROUPS), list[RolloutGroup])
    assert_same(found, GROUPS)
    assert len({id(r.prompt_ids) for group in found for r in group.rollouts}) == 1


@pytest.mark.parametrize("change", [lambda b: b[:-8], lambda b: b + bytes(8)])
def test_arrays_of_another_length_are_refused(change):
    packed = pack(GROUPS)
    with pytest.raises(ValueError):
        unpack(Packed(packed.header, change(packed.arrays)), list[RolloutGroup])


def test_without_arrays_masks_and_samples_stay_and_the_rest_takes_no_memory():
    packed = pack_without_arrays(GROUPS, num_samples=1)
    found = unpack(packed, list[RolloutGroup])
    for kept, sent in zip(GROUPS[0].rollouts, found[0].rollouts, strict=True):  # a whole group
        assert sent.token_ids.tolist() == kept.token_ids.tolist()
    first, masked, last, _ = (r for group in found for r in group.rollouts)
    assert first.token_ids.tolist() == [0, 1]
    assert first.prompt_ids.tolist() == PROMPT.tolist()
    assert masked.sampled is not None and masked.sampled.tolist() == [False, True, True]
    assert (len(last.token_ids), last.token_ids.strides, last.token_ids.any()) == (5, (0,), False)
    assert last.teacher_top_ids is not None and last.teacher_top_ids.shape == (5, 2)
    assert first.logprobs.tolist() == [0, 1] and not last.logprobs.any()
    assert len(packed.arrays) == 64  # with padding


def test_every_column_of_a_generation_is_joined():
    parts = [rollout(2, has_mask=True), rollout(3, has_mask=True)]
    whole = joined(*parts)
    for name in ("token_ids", "logprobs", "sampled"):
        values = np.concatenate([getattr(part, name) for part in parts])
        assert getattr(whole, name).tolist() == values.tolist()
    assert whole.segments == (VersionSegment(0, 0, 1), VersionSegment(1, 1, 2), *(
        VersionSegment(0, 2, 3), VersionSegment(1, 3, 5)
    ))  # fmt: skip
    assert (whole.num_context, whole.new_rows) == (2, ((1, 1), (3, 1)))
    old, new = (replace(parts[0], segments=(VersionSegment(v, 0, 2),)) for v in (4, 5))
    neighbors = joined(joined(old, new), new).segments
    assert neighbors == (VersionSegment(4, 0, 2), VersionSegment(5, 2, 6))


def test_what_a_part_lacks_is_filled_in_a_joined_column():
    mask, lists = Column(np.bool_, fill=True), Column(np.int32, fill=-1, is_list=True)
    assert mask.joined([(2, None), (1, np.array([False]))]).tolist() == [True, True, False]
    assert mask.joined([(2, None), (1, None)]) is None
    short, long = np.array([[7]], np.int32), np.array([[8, 9]], np.int32)
    assert lists.joined([(1, short), (1, None), (1, long)]).tolist() == [[7, -1], [-1, -1], [8, 9]]
