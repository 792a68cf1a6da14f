# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A file with a teacher's ratings is replayed under a teacher's conditions, or refused."""

from dataclasses import replace

import numpy as np
import pytest

from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.record import (
    BatchRecord,
    GroupRecord,
    RolloutRecord,
    RolloutRecorder,
    TopTokensRecord,
)
from torchtitan.grpo.data.replay import ReplaySource, check_batch
from torchtitan.grpo.data.replayed_ratings import check_ratings_are_used
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, VersionSegment


def record(*ratings: list[float] | None, **changes) -> BatchRecord:
    """A group with one rollout of two tokens for each rating."""
    fields = {"completion_ids": [7, 8], "logprobs": [-1.0, -2.0], "segments": [(0, 0, 2)]}
    rollouts = [
        RolloutRecord(reward=1.0, teacher_logprobs=rating, **fields | changes) for rating in ratings
    ]
    return BatchRecord(0, PromptProgress(), [GroupRecord(3, [5, 6], rollouts)])


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([[-1.0], [-1.0, -2.0]], r"file:2, group 3, rollout 0: each of the 2 .*logprob, got 1"),
        ([[-1.0, -1e300], [-1.0, -2.0]], r"teacher_logprobs must be finite, above -9999"),
        (
            [[-1.0, -2.0], [-9999.0, -2.0]],
            r"rollout 1: teacher_logprobs must .* got -9999.0 at token 0",
        ),
        ([[-1.0, 0.5], [-1.0, -2.0]], r"rollout 0: teacher_logprobs must .* not above 0, got 0.5"),
        ([[-1.0, -2.0], None], r"all rollouts of a group must have teacher_logprobs.*got 1 of 2"),
    ],
)
def test_ratings_that_do_not_fit_their_group_are_refused(ratings, message):
    for fitting in ([None, None], [[-1.0, -2.0], [-3.0, -0.5]]):
        check_batch(record(*fitting), "file:2", vocab_size=100, row_len=10)
    with pytest.raises(DataError, match=message):
        check_batch(record(*ratings), "file:2", vocab_size=100, row_len=10)


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("grpo", "filter_zero_advantage", True, r"grpo\.filter_zero_advantage = false, or teacher"),
        ("grpo", "off_policy_mask_threshold", 0.5, r"grpo\.off_policy_mask_threshold.*got 0\.5"),
        ("rollout", "temperature", 0.7, r"rollout\.temperature = 1, got 0\.7"),
    ],
)
def test_settings_that_would_lose_ratings_are_refused_while_these_teach(table, key, value, message):
    config = JobConfig()
    rated, unrated = record([-1.0, -2.0]), record(None)
    check_ratings_are_used(rated, "file:2", config)
    setattr(getattr(config, table), key, value)
    check_ratings_are_used(unrated, "file:2", config)
    with pytest.raises(DataError, match=rf"file:2, group 3: .*{message}"):
        check_ratings_are_used(rated, "file:2", config)
    config.teacher.coef = 0.0
    check_ratings_are_used(rated, "file:2", config)


def test_ratings_of_rollouts_with_rewritten_turns_are_refused():
    rated = record([-1.0, -2.0], new_rows=[(1, 1)])
    with pytest.raises(DataError, match=r"from their beginning, but one has new_rows"):
        check_ratings_are_used(rated, "file:2", JobConfig())


def top_record(
    ids: list[list[int]], logprobs: list[list[float]] | None = None, k: int = 2
) -> TopTokensRecord:
    values = np.full(np.shape(ids), -1.0) if logprobs is None else logprobs
    return TopTokensRecord(
        k, np.array(ids, np.int32).tobytes(), np.array(values, np.float32).tobytes()
    )


TOP = top_record([[7, 1], [8, 2]])


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (
            top_record([[7, 1]]),
            r"rollout 0: teacher_top must hold k ids .* each of the 2 completion",
        ),
        (top_record([[7, 1], [8, 2]], k=3), r"teacher_top must hold k ids"),
        (top_record([[7, 1], [8, 2]], k=0), r"k must be at least 1"),
        (TopTokensRecord(2, TOP.ids, TOP.logprobs[:8]), r"teacher_top must hold k ids"),
        (TopTokensRecord(2, TOP.ids[:-1], TOP.logprobs), r"teacher_top must hold k ids"),
        (top_record([[7, 1], [8, 100]]), r"ids of teacher_top must be in \[0, 100\)"),
        (top_record([[7, 1], [-8, 2]]), r"ids of teacher_top must be in"),
        (top_record([[7, 1], [2, 2]]), r"ids of teacher_top must be different at each token"),
        (
            top_record([[7, 1], [8, 2]], [[-1.0, -2.0], [-1.0, -np.inf]]),
            r"logprobs of teacher_top must be finite",
        ),
        (
            top_record([[7, 1], [8, 2]], [[-1.0, -2.0], [-9999.0, -1.0]]),
            r"logprobs of teacher_top must be finite, above -9999 .* got -9999.0 at token 1",
        ),
        (
            top_record([[7, 1], [8, 2]], [[-1.0, 1e30], [-3.0, -1.0]]),
            r"logprobs of teacher_top must be finite, .* at token 0",
        ),
    ],
)
def test_most_likely_tokens_that_do_not_fit_their_rollout_are_refused(top, message):
    check_batch(record([-1.0, -2.0], teacher_top=TOP), "file:2", vocab_size=100, row_len=10)
    with pytest.raises(DataError, match=message):
        check_batch(record([-1.0, -2.0], teacher_top=top), "file:2", vocab_size=100, row_len=10)


def test_all_rollouts_of_a_group_have_the_same_number_of_most_likely_tokens():
    batch = record([-1.0, -2.0], [-1.0, -2.0], teacher_top=TOP)
    batch.groups[0].rollouts[1].teacher_top = None
    with pytest.raises(DataError, match=r"same number of most likely tokens .* got \[0, 2\]"):
        check_batch(batch, "file:2", vocab_size=100, row_len=10)
    with pytest.raises(DataError, match=r"and others none, got \[2\]"):
        check_batch(record(None, teacher_top=TOP), "file:2", vocab_size=100, row_len=10)


@pytest.mark.parametrize(
    ("top", "message"),
    [(None, r"got none, .* Set teacher\.top_k = 0"), (TOP, r"\(3\), got 2, .* = 2")],
)
def test_a_replay_with_top_k_needs_as_many_tokens_in_the_file(top, message):
    config, batch = JobConfig(), record([-1.0, -2.0], teacher_top=top)
    check_ratings_are_used(batch, "file:2", config)  # those of the sampled tokens
    config.teacher.top_k = 3
    with pytest.raises(
        DataError, match=rf"group 3: .* as many of its most likely tokens .*{message}"
    ):
        check_ratings_are_used(batch, "file:2", config)
    config.teacher.coef = 0.0
    if top is None:  # then no token is compared
        check_ratings_are_used(batch, "file:2", config)
    else:
        with pytest.raises(DataError, match=r"teacher\.top_k \(3\), got 2\. Set .* = 2 or 0"):
            check_ratings_are_used(batch, "file:2", config)
    config.teacher.coef, config.teacher.top_k = 1.0, 0 if top is None else 2
    check_ratings_are_used(batch, "file:2", config)


def test_with_top_k_the_advantage_of_a_sequence_may_decide_over_it():
    config = JobConfig()
    config.teacher.top_k, config.grpo.off_policy_mask_threshold = 2, 0.5
    check_ratings_are_used(record([-1.0, -2.0], teacher_top=TOP), "file:2", config)


@pytest.mark.parametrize("rates_second", [True, False])
def test_a_replay_finds_wrong_ratings_before_its_first_step(tmp_path, repository, rates_second):
    model = read_hf_model(repository / "assets/reverse_digits/model")
    ids, logprobs = np.array([7, 8, 3], np.int32), np.array([-0.1, -0.7, -0.2], np.float32)
    segments = (VersionSegment(0, 0, 3),)
    rated = Rollout(
        prompt_ids=ids,
        token_ids=ids,
        logprobs=logprobs,
        segments=segments,
        finish_reason="stop",
        completion="text",
        reward=1.0,
        teacher_logprobs=logprobs - 1,
    )
    second = rated if rates_second else replace(rated, teacher_logprobs=None)
    path = tmp_path / "rollouts.jsonl"
    recorder = RolloutRecorder(str(path), model.vocab_size, 1.0, 0)
    groups = [RolloutGroup(i, "ask", (r, r), "") for i, r in enumerate((rated, second))]
    recorder.write(0, PromptProgress(2), groups)
    recorder.close()
    config = JobConfig()
    config.job.dump_folder = str(tmp_path / "out")
    config.rollout.replay = str(path)
    config.training.seq_len = 16

    def start() -> None:
        source = ReplaySource(
            config, model, start_version=0, progress=PromptProgress(), should_stop=lambda: False
        )
        try:
            source.start()
        finally:
            source.close()

    start()
    config.teacher.urls = ["http://127.0.0.1:9000"]
    if rates_second:
        start()
        config.grpo.filter_zero_advantage = True
        with pytest.raises(DataError, match=r"rollout\.replay.*filter_zero_advantage"):
            start()
    else:
        with pytest.raises(DataError, match=r"group 1 has none, and a replay asks no server"):
            start()
