# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.rollout import group_frames, link_messages
from torchtitan.grpo.types import BatchPart, PromptProgress, Rollout, RolloutGroup, VersionSegment


def rollout(rng: np.random.Generator, prompt_ids: np.ndarray, length: int) -> Rollout:
    return Rollout(
        prompt_ids=prompt_ids,
        token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        logprobs=-rng.random(length, dtype=np.float32),
        segments=(VersionSegment(3, 0, 1), VersionSegment(4, 1, length)),
        finish_reason="stop",
        completion="färbig\n",
        reward=float(rng.random()),
        reward_components={"exact_match": 1.0},
        sampled=rng.random(length) < 0.7 if rng.random() < 0.5 else None,
    )


def group(rng: np.random.Generator, group_id: int, lengths: list[int]) -> RolloutGroup:
    prompt_ids = rng.integers(0, 100, 1 + group_id, dtype=np.int32)
    rollouts = tuple(rollout(rng, prompt_ids, length) for length in lengths)
    return RolloutGroup(group_id, "prompt ✓", rollouts, "http://127.0.0.1:1")


def plain(groups: list[RolloutGroup]) -> list:
    """Comparable: arrays turned into lists."""
    return [
        (
            g.group_id,
            g.prompt_text,
            g.server_url,
            [
                (
                    r.prompt_ids.tolist(),
                    r.token_ids.tolist(),
                    r.logprobs.tolist(),
                    r.segments,
                    r.finish_reason,
                    r.completion,
                    r.reward,
                    r.reward_components,
                    None if r.sampled is None else r.sampled.tolist(),
                )
                for r in g.rollouts
            ],
        )
        for g in groups
    ]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), max_size=5))
def test_batch_survives_the_wire_bit_for_bit(lengths: list[list[int]]):
    rng = np.random.default_rng(0)
    groups = [group(rng, i, sizes) for i, sizes in enumerate(lengths)]
    headers, frames = group_frames.pack_groups(groups)
    message = link_messages.encode(
        link_messages.Batch(
            7,
            PromptProgress(42, (3, 40)),
            {5: "failed"},
            {"reward/mean": 0.5},
            headers,
            BatchPart.LAST,
        )
    )
    batch = link_messages.decode_answer(message)
    assert isinstance(batch, link_messages.Batch)
    assert (batch.version, batch.metrics) == (7, {"reward/mean": 0.5})
    assert batch.part is BatchPart.LAST
    assert (batch.progress, batch.closed) == (PromptProgress(42, (3, 40)), {5: "failed"})
    received = group_frames.unpack_groups(batch.groups, frames)
    assert plain(received) == plain(groups)
    for g in received:
        for r in g.rollouts:
            assert r.token_ids.dtype == r.prompt_ids.dtype == np.int32
            assert r.logprobs.dtype == np.float32


def test_commands_and_notices_keep_their_kind():
    command = link_messages.decode_command(link_messages.encode(link_messages.NextBatch(3)))
    assert command == link_messages.NextBatch(3)
    notice = link_messages.decode_notice(
        link_messages.encode(link_messages.ServerLost("http://a", "gone"))
    )
    assert notice == link_messages.ServerLost("http://a", "gone")
