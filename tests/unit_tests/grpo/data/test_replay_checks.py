# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A recorded batch is replayed if a run can train on it, with ratings under a teacher's conditions."""

import contextlib

import numpy as np
import pytest
from rollouts import group, rollout

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.record import BatchRecord, RolloutRecorder
from torchtitan.grpo.data.replay import ReplaySource, check_batch, check_ratings_are_used
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.types import PromptProgress, Rollout

RATING = np.array([-1, -2], np.float32)
TOP = {
    "teacher_top_ids": np.array([[7, 1], [8, 2]], np.int32),
    "teacher_top_logprobs": np.array([[-1, -1], [-1, -1]], np.float32),
}


def batch(*rollouts: Rollout, **progress) -> BatchRecord:
    return BatchRecord(0, PromptProgress(**progress), [group(3, *rollouts)])


def check(found: BatchRecord) -> None:
    check_batch(found, "file:2", vocab_size=100, row_len=10)


def rated(*ratings: np.ndarray | None, **changes) -> BatchRecord:
    """A group with one rollout for each rating."""
    return batch(*(rollout(2, teacher_logprobs=rating, **changes) for rating in ratings))


ONE = group(3, rollout(2))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (batch(rollout([7, 100])), r"group 3, rollout 0: its token ids are 7 to 100"),
        (batch(rollout(2, version=1)), r"versions up to that of the batch \(0\), got 1"),
        (batch(rollout(2, sampled=np.zeros(2, bool))), r"sampled must leave a completion token"),
        (BatchRecord(0, PromptProgress(), [ONE, ONE]), r"group_id must be unique, got \[3, 3\]"),
        (BatchRecord(0, PromptProgress(), []), r"file:2: a batch must have a group"),
        (batch(), r"a group must have a rollout"),
        (rated(RATING, None), r"all rollouts of a group must have teacher_logprobs.*got 1 of 2"),
        (
            batch(rollout(2, teacher_logprobs=RATING, **TOP), rollout(2, teacher_logprobs=RATING)),
            r"same number of most likely tokens .* got \[0, 2\]",
        ),
        (rated(None, **TOP), r"and others none, got \[2\]"),
        *(
            (batch(rollout(2), position=position, open=places), "progress.open must be ascending")
            for position, places in ((-1, ()), (3, (3,)), (3, (2, 1)), (3, (1, 1)), (3, (-1, 1)))
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_place(found, message):
    for fine in (batch(rollout(2)), rated(None, None), rated(RATING, RATING), rated(RATING, **TOP)):
        check(fine)
    with pytest.raises(DataError, match=message):
        check(found)


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("grpo", "filter_zero_advantage", True, r"grpo\.filter_zero_advantage = false, or set"),
        ("grpo", "off_policy_mask_threshold", 0.5, r"grpo\.off_policy_mask_threshold.*got 0\.5"),
        ("rollout", "temperature", 0.7, r"rollout\.temperature = 1, got 0\.7"),
    ],
)
def test_settings_that_would_lose_ratings_are_refused_while_these_teach(table, key, value, message):
    config, taught = JobConfig(), rated(RATING)
    check_ratings_are_used(taught, "file:2", config)
    setattr(getattr(config, table), key, value)
    check_ratings_are_used(rated(None), "file:2", config)
    with pytest.raises(DataError, match=rf"file:2, group 3: .*{message}"):
        check_ratings_are_used(taught, "file:2", config)
    config.teacher.coef = 0.0
    check_ratings_are_used(taught, "file:2", config)
    rewritten = rated(RATING, new_rows=((1, 1),))
    with pytest.raises(DataError, match=r"from their beginning, but one has new_rows"):
        check_ratings_are_used(rewritten, "file:2", JobConfig())


@pytest.mark.parametrize(
    ("top", "message"),
    [({}, r"got none, .* Set teacher\.top_k = 0"), (TOP, r"\(3\), got 2, .* = 2")],
)
def test_a_replay_with_top_k_needs_as_many_tokens_in_the_file(top, message):
    config, found = JobConfig(), rated(RATING, **top)
    check_ratings_are_used(found, "file:2", config)  # those of the sampled tokens
    config.teacher.top_k = 3
    with pytest.raises(DataError, match=rf"group 3: .* as many of its most likely .*{message}"):
        check_ratings_are_used(found, "file:2", config)
    config.teacher.coef = 0.0
    if not top:  # then no token is compared
        check_ratings_are_used(found, "file:2", config)
    else:
        with pytest.raises(DataError, match=r"teacher\.top_k \(3\), got 2\. Set .* = 2 or 0"):
            check_ratings_are_used(found, "file:2", config)
    config.teacher.coef, config.teacher.top_k = 1.0, 2 if top else 0
    config.grpo.off_policy_mask_threshold = 0.5 if top else 0.0
    check_ratings_are_used(found, "file:2", config)


@pytest.mark.parametrize("rates_second", [True, False])
def test_a_replay_finds_wrong_ratings_before_its_first_step(tmp_path, repository, rates_second):
    model = read_hf_model(repository / "assets/reverse_digits/model")
    first, unrated = rollout(2, teacher_logprobs=RATING), rollout(2)
    path = tmp_path / "rollouts.jsonl"
    recorder = RolloutRecorder(str(path), model.vocab_size, 1.0, 0)
    pairs = enumerate((first, first if rates_second else unrated))
    recorder.write(0, PromptProgress(2), [group(i, r, r) for i, r in pairs])
    recorder.close()
    config = JobConfig()
    config.job.dump_folder = str(tmp_path / "out")
    config.rollout.replay = str(path)
    config.training.seq_len = 16

    def start() -> None:
        arguments = {"start_version": 0, "progress": PromptProgress()}
        source = ReplaySource(config, model, should_stop=lambda: False, **arguments)
        with contextlib.closing(source):
            source.start()

    start()
    config.teacher.urls = ["http://127.0.0.1:9000"]
    if rates_second:
        start()
        config.grpo.filter_zero_advantage = True
        with pytest.raises(DataError, match=r"rollout\.replay.*filter_zero_advantage"):
            start()
    else:
        with pytest.raises(DataError, match=r"group 1: .* has none, and a replay asks no server"):
            start()
