# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rollouts in flight, in a file beside the checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from torchtitan.grpo.rollout.saved import (
    SavedRollouts,
    SavedRolloutsError,
    UnfinishedGroup,
    discard_after,
    file_of,
    read_saved,
    remove_others,
    write_saved,
)
from torchtitan.grpo.types import Generation, PromptProgress, Rollout, RolloutGroup, VersionSegment


def some() -> SavedRollouts:
    ids = np.array([5, 6, 7], np.int32)
    logprobs = np.array([-0.1, -0.25, -3.5], np.float32)
    segments = (VersionSegment(3, 0, 1), VersionSegment(4, 1, 3))
    rollout = Rollout(ids[:2], ids, logprobs, segments, "stop", "abc", 0.5, {"exact": 0.5})
    return SavedRollouts(
        version=4,
        progress=PromptProgress(9, (6, 8)),
        closed={7: "filtered"},
        finished=(RolloutGroup(6, "prompt", (rollout, rollout), "http://a"),),
        unfinished=(
            UnfinishedGroup(
                8,
                3,
                (Generation(ids, logprobs, "length", segments),),
                (Generation(ids, logprobs, "stop", segments, np.array([1, 0, 1], bool), 0.5),),
            ),
        ),
    )


def test_what_is_written_is_read_back(tmp_path: Path):
    path = file_of(str(tmp_path), 4)
    write_saved(path, some())
    found, expected = read_saved(path, 4), some()
    assert (found.version, found.progress, found.closed) == (4, expected.progress, expected.closed)
    (group,), (unfinished,) = found.finished, found.unfinished
    assert (group.group_id, group.prompt_text, group.server_url) == (6, "prompt", "http://a")
    for rollout, same in zip(group.rollouts, expected.finished[0].rollouts, strict=True):
        assert rollout.completion_ids.tolist() == same.completion_ids.tolist()
        assert rollout.generator_logprobs.tobytes() == same.generator_logprobs.tobytes()
        assert (rollout.segments, rollout.reward) == (same.segments, same.reward)
    (generation,), (same_generation,) = unfinished.generations, expected.unfinished[0].generations
    assert (unfinished.group_id, unfinished.start_version) == (8, 3)
    assert generation.token_ids.tolist() == same_generation.token_ids.tolist()
    assert generation.logprobs.tobytes() == same_generation.logprobs.tobytes()
    assert generation.segments == same_generation.segments
    assert (generation.sampled, generation.environment_reward) == (None, None)
    (begun,) = unfinished.begun
    assert begun.sampled is not None and begun.sampled.tolist() == [True, False, True]
    assert (begun.environment_reward, begun.num_written) == (0.5, 2)
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_file_and_one_of_another_step_are_refused(tmp_path: Path):
    path = file_of(str(tmp_path), 4)
    write_saved(path, some())
    with pytest.raises(
        SavedRolloutsError, match=r"must hold the rollouts of step 5, got those of step 4"
    ):
        read_saved(path, 5)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SavedRolloutsError, match=r"the file cannot be read: "):
        read_saved(path, 4)


def test_files_go_with_their_checkpoints(tmp_path: Path):
    for step in (2, 4, 6, 8):
        write_saved(file_of(str(tmp_path), step), some())
    remove_others(str(tmp_path), [4, 6, 8])
    discard_after(str(tmp_path), 6)
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        "step-4.msgpack",
        "step-6.msgpack",
    ]
