# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollouts import assert_same, generation, group, rollout

from torchtitan.grpo.rollout.saved import (
    SavedRollouts,
    SavedRolloutsError,
    UnfinishedGroup,
    check_saved,
    discard_after,
    file_of,
    read_saved,
    remove_others,
    write_saved,
)
from torchtitan.grpo.types import PromptProgress, VersionSegment

IDS, LOGPROBS = [5, 6, 7], [-0.1, -0.25, -3.5]
SEGMENTS = (VersionSegment(3, 0, 1), VersionSegment(4, 1, 3))
CHECKPOINT = PromptProgress(7, (6,))
"""Progress in the checkpoint: prompts 7 and 8 were issued after it, and 7 was closed."""


def some(
    finished: dict[str, Any] | None = None, begun: dict[str, Any] | None = None
) -> SavedRollouts:
    """A finished and an unfinished group; of one rollout of each these fields are others."""
    done = rollout(IDS, 0.5, LOGPROBS, segments=SEGMENTS, reward_components={"exact": 0.5})
    mask = np.array([1, 0, 1], bool)
    part = generation(IDS, LOGPROBS, segments=SEGMENTS, sampled=mask, environment_reward=0.5)
    whole = generation(IDS, LOGPROBS, segments=SEGMENTS, finish_reason="length")
    return SavedRollouts(
        version=4,
        progress=PromptProgress(9, (6, 8)),
        closed={7: "filtered"},
        finished=(group(6, replace(done, **finished or {}), done, prompt_text="prompt"),),
        unfinished=(UnfinishedGroup(8, 3, (whole,), (replace(part, **begun or {}),)),),
    )


def check(saved: SavedRollouts) -> None:
    check_saved(saved, CHECKPOINT, vocab_size=8, row_len=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return file_of(str(tmp_path), 4)


def test_what_is_written_is_read_back_and_no_flipped_bit_is_trained_on(path: Path):
    write_saved(path, some())
    assert_same(read_saved(path, 4), some())
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(
        SavedRolloutsError, match=r"hold the rollouts of step 5, got those of step 4"
    ):
        read_saved(path, 5)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(SavedRolloutsError):
            check(read_saved(path, 4))
    path.write_bytes(content[:-7])
    with pytest.raises(SavedRolloutsError, match=r"the file cannot be read: "):
        read_saved(path, 4)


def test_files_go_with_their_checkpoints(tmp_path: Path):
    for step in (2, 4, 6, 8):
        write_saved(file_of(str(tmp_path), step), some())
    remove_others(str(tmp_path), [4, 6, 8])
    discard_after(str(tmp_path), 6)
    left = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert left == ["step-4.msgpack", "step-6.msgpack"]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


RATED = {"teacher_logprobs": floats(-1, -1, -1)}
WRONG = {
    "an id beyond the vocabulary": some({"token_ids": np.array([5, 8, 7], np.int32)}),
    "a version to come": some({"segments": (VersionSegment(5, 0, 3),)}),
    "too many tokens for a row": some(None, vars(generation(9)) | {"sampled": None}),
    "an infinite reward": some({"reward": np.inf}),
    "a part of the reward that is none": some({"reward_components": {"exact": np.nan}}),
    "a reward that no function may give": some({"reward": 1e30}),
    "a large negative reward": some({"reward": -1.1e12}),
    "a large part of the reward": some({"reward_components": {"exact": 0.5, "long": 1e30}}),
    "a logged value that is none": some({"reward_metrics": {"length": np.nan}}),
    "a large reward of an environment": some(None, {"environment_reward": 1e30}),
    "a reward of an environment that is none": some(None, {"environment_reward": np.nan}),
    "an infinite reward of an environment": some(None, {"environment_reward": -np.inf}),
    "a prompt that is forgotten": replace(some(), progress=PromptProgress(9, (6,))),
    "a prompt that is open and closed": replace(some(), progress=PromptProgress(9, (6, 7, 8))),
    "a prompt that is trained already": replace(some(), progress=PromptProgress(9, (5, 6, 8))),
    "a position before the checkpoint": replace(some(), progress=PromptProgress(6, (6, 8))),
    "a prompt that is open twice": replace(some(), progress=PromptProgress(9, (6, 8, 8))),
    "a position beyond memory": replace(some(), progress=PromptProgress(1 << 60, (6, 8))),
    "a group of no prompt": replace(some(), unfinished=(UnfinishedGroup(5, 3, ()),)),
    "a group twice": replace(some(), unfinished=(UnfinishedGroup(6, 3, ()),)),
    "a group from the future": replace(some(), unfinished=(UnfinishedGroup(8, 5, ()),)),
    "a group without rollouts": replace(some(), finished=(group(6),)),
}


@pytest.mark.parametrize("what", WRONG)
def test_kept_rollouts_must_pass_what_a_server_s_answer_must_pass(what):
    large = {"reward": -1e12, "reward_metrics": {"nanoseconds": 1e18}}
    unscored = {"reward": None, "reward_components": {}}
    for fine in (some(), some(RATED), some(None, {"num_context": 1}), some(large), some(unscored)):
        check(fine)
    with pytest.raises(SavedRolloutsError):
        check(WRONG[what])


def test_a_file_that_cannot_be_written_leaves_nothing_behind(path: Path):
    path.mkdir(parents=True)  # so that it cannot be replaced
    (path / "x").touch()
    with pytest.raises(OSError):
        write_saved(path, some())
    assert list(path.parent.iterdir()) == [path]
