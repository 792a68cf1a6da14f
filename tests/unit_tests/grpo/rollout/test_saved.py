# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rollouts in flight, in a file beside the checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from torchtitan.grpo.types import (
    Generation,
    PromptProgress,
    Rollout,
    RolloutGroup,
    VersionSegment,
)


def some() -> SavedRollouts:
    ids = np.array([5, 6, 7], np.int32)
    logprobs = np.array([-0.1, -0.25, -3.5], np.float32)
    segments = (VersionSegment(3, 0, 1), VersionSegment(4, 1, 3))
    rollout = Rollout(
        prompt_ids=ids[:2],
        token_ids=ids,
        logprobs=logprobs,
        segments=segments,
        finish_reason="stop",
        completion="abc",
        reward=0.5,
        reward_components={"exact": 0.5},
    )
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
        assert rollout.token_ids.tolist() == same.token_ids.tolist()
        assert rollout.logprobs.tobytes() == same.logprobs.tobytes()
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


SIZES = {"vocab_size": 8, "row_len": 8}
CHECKPOINT = PromptProgress(7, (6,))
"""Progress in the checkpoint: prompts 7 and 8 were issued after it, and 7 was closed."""


def altered(saved: SavedRollouts, **changes: Any) -> SavedRollouts:
    """Changes fields of the finished group's first rollout."""
    (group,) = saved.finished
    first = replace(group.rollouts[0], **changes)
    return replace(saved, finished=(replace(group, rollouts=(first, *group.rollouts[1:])),))


def begun(saved: SavedRollouts, **changes: Any) -> SavedRollouts:
    """Changes fields of the unfinished completion."""
    (group,) = saved.unfinished
    return replace(saved, unfinished=(replace(group, begun=(replace(group.begun[0], **changes),)),))


def logprobs(value: float) -> np.ndarray:
    return np.array([-0.5, value, -0.5], np.float32)


TOP = {
    "teacher_logprobs": logprobs(-1),
    "teacher_top_ids": np.array([[1, 2]] * 3, np.int32),
    "teacher_top_logprobs": np.full((3, 2), -1.0, np.float32),
}
WRONG = {
    "an id beyond the vocabulary": altered(some(), token_ids=np.array([5, 8, 7], np.int32)),
    "a negative id": begun(some(), token_ids=np.array([5, -6, 7], np.int32)),
    "a prompt beyond the vocabulary": altered(some(), prompt_ids=np.array([5, 80], np.int32)),
    "no prompt": altered(some(), prompt_ids=np.array([], np.int32)),
    **{
        f"{make.__name__} with a logprob of {value}": make(some(), **{name: logprobs(value)})
        for make, name in ((altered, "logprobs"), (begun, "logprobs"))
        for value in (np.nan, np.inf, -np.inf, -100.0, -9999.0, 0.5, 1e30)
    },
    "too few logprobs": begun(some(), logprobs=np.zeros(2, np.float32)),
    "a gap between versions": begun(some(), segments=(VersionSegment(3, 0, 1),)),
    "versions that overlap": altered(
        some(), segments=(VersionSegment(3, 0, 2), VersionSegment(4, 1, 3))
    ),
    "a version to come": altered(some(), segments=(VersionSegment(5, 0, 3),)),
    "a version that was never pushed": begun(some(), segments=(VersionSegment(-7, 0, 3),)),
    "too many tokens for a row": begun(
        some(), token_ids=np.zeros(9, np.int32), logprobs=np.zeros(9, np.float32), sampled=None,
        segments=(VersionSegment(4, 0, 9),),
    ),
    "more context than there is": begun(some(), num_context=2),
    "rows that begin nowhere": altered(some(), new_rows=((3, 1),)),
    "an infinite reward": altered(some(), reward=np.inf),
    "a part of the reward that is none": altered(some(), reward_components={"exact": np.nan}),
    "an infinite reward of an environment": begun(some(), environment_reward=-np.inf),
    "a rating that is infinite": altered(some(), teacher_logprobs=logprobs(-np.inf)),
    "a rating that was cut": altered(some(), teacher_logprobs=logprobs(-9999.0)),
    "likely tokens beyond the vocabulary": altered(
        some(), **TOP | {"teacher_top_ids": TOP["teacher_top_ids"] + 7}
    ),
    "likely tokens without a number": altered(
        some(), **TOP | {"teacher_top_logprobs": TOP["teacher_top_logprobs"] * np.inf}
    ),
    "a prompt that is forgotten": replace(some(), progress=PromptProgress(9, (6,))),
    "a prompt that is open and closed": replace(some(), progress=PromptProgress(9, (6, 7, 8))),
    "a prompt that is trained already": replace(some(), progress=PromptProgress(9, (5, 6, 8))),
    "a position before the checkpoint": replace(some(), progress=PromptProgress(6, (6, 8))),
    "a prompt that is open twice": replace(some(), progress=PromptProgress(9, (6, 8, 8))),
    "a position that no memory can count to": replace(
        some(), progress=PromptProgress(1 << 60, (6, 8))
    ),
    "a group of no prompt": replace(some(), unfinished=(UnfinishedGroup(5, 3, ()),)),
    "a group twice": replace(some(), unfinished=(UnfinishedGroup(6, 3, ()),)),
    "a group from the future": replace(some(), unfinished=(UnfinishedGroup(8, 5, ()),)),
    "a group without rollouts": replace(some(), finished=(RolloutGroup(6, "", (), ""),)),
}  # fmt: skip


def test_what_a_run_keeps_passes_the_checks():
    rated = altered(some(), **TOP)
    for saved in (some(), rated, begun(some(), logprobs=logprobs(-87.0), num_context=1)):
        check_saved(saved, CHECKPOINT, **SIZES)


@pytest.mark.parametrize("what", WRONG)
def test_kept_rollouts_must_pass_what_a_server_s_answer_must_pass(what):
    with pytest.raises(SavedRolloutsError):
        check_saved(WRONG[what], CHECKPOINT, **SIZES)


def test_no_flipped_bit_is_trained_on_nor_ends_the_run(tmp_path: Path):
    path = file_of(str(tmp_path), 4)
    write_saved(path, some())
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(SavedRolloutsError):
            check_saved(read_saved(path, 4), CHECKPOINT, **SIZES)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path):
    path = file_of(str(tmp_path), 4)
    path.mkdir(parents=True)  # so that it cannot be replaced
    (path / "x").touch()
    with pytest.raises(OSError):
        write_saved(path, some())
    assert list(path.parent.iterdir()) == [path]
