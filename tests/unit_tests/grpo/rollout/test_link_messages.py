# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.codec import Packed, pack, unpack
from torchtitan.grpo.types import BatchPart, PromptProgress, RolloutGroup


def test_a_batch_survives_the_wire():
    groups = [RolloutGroup(3, "prompt ✓", (), "http://127.0.0.1:1")]
    packed = pack(groups)
    progress = PromptProgress(42, (3, 40))
    sent = link_messages.Batch(
        7, progress, {5: "failed"}, {"reward/mean": 0.5}, packed.header, BatchPart.LAST
    )
    batch = link_messages.decode_answer(link_messages.encode(sent))
    assert isinstance(batch, link_messages.Batch)
    assert (batch.version, batch.metrics) == (7, {"reward/mean": 0.5})
    assert batch.part is BatchPart.LAST
    assert (batch.progress, batch.closed) == (progress, {5: "failed"})
    assert unpack(Packed(batch.groups, packed.arrays), list[RolloutGroup]) == groups


def test_commands_and_notices_keep_their_kind():
    command = link_messages.decode_command(link_messages.encode(link_messages.NextBatch(3)))
    assert command == link_messages.NextBatch(3)
    notice = link_messages.decode_notice(
        link_messages.encode(link_messages.ServerLost("http://a", "gone"))
    )
    assert notice == link_messages.ServerLost("http://a", "gone")
