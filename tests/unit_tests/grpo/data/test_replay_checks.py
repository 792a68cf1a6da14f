# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A recorded batch is replayed if a run can train on it, with ratings under a teacher's conditions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.record import BatchRecord, RolloutRecorder
from torchtitan.grpo.data.replay import ReplaySource
from torchtitan.grpo.data.replay_checks import check_batch, check_ratings_are_used
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, VersionSegment

DTYPES = {
    "token_ids": np.int32, "prompt_ids": np.int32, "logprobs": np.float32, "sampled": np.bool_,
    "teacher_logprobs": np.float32, "teacher_top_ids": np.int32, "teacher_top_logprobs": np.float32,
}  # fmt: skip


def rollout(**changes) -> Rollout:
    fields = {
        "token_ids": [7, 8], "logprobs": [-1, -2], "segments": [(0, 0, 2)], "finish_reason": "stop",
        "prompt_ids": [5, 6], "completion": "", "reward": 1.0,
    } | changes  # fmt: skip
    for name, dtype in DTYPES.items():
        if fields.get(name) is not None:
            with np.errstate(over="ignore"):
                fields[name] = np.array(fields[name]).astype(dtype)
    fields["segments"] = tuple(VersionSegment(*segment) for segment in fields["segments"])
    return Rollout(**fields)


def batch(*rollouts: Rollout, **progress) -> BatchRecord:
    return BatchRecord(0, PromptProgress(**progress), [RolloutGroup(3, "", rollouts, "")])


def check(found: BatchRecord) -> None:
    check_batch(found, "file:2", vocab_size=100, row_len=10)


def rated(*ratings: list[float] | None, **changes) -> BatchRecord:
    """A group with one rollout for each rating."""
    return batch(*(rollout(teacher_logprobs=rating, **changes) for rating in ratings))


TOP = {"teacher_top_ids": [[7, 1], [8, 2]], "teacher_top_logprobs": [[-1, -1], [-1, -1]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_ids": [7, 100]},
            r"group 3, rollout 0: its token ids are 7 to 100, expected 0 to 99",
        ),
        ({"token_ids": [-1, 7]}, r"its token ids are -1 to 7"),
        ({"token_ids": []}, r"it has no token"),
        ({"prompt_ids": [5, 100]}, r"the prompt must have token ids in \[0, 100\)"),
        ({"prompt_ids": []}, r"the prompt must have token ids"),
        ({"logprobs": [-1.0]}, r"its 1 logprobs are not one for each of 2 completion tokens"),
        *(
            ({"logprobs": [-1.0, value]}, r"its logprobs must be finite, above -87\.337 .* token 1")
            for value in (-1e300, -87.4, -104.0, -9999.0, 0.1, 1e30, math.inf, -math.inf, math.nan)
        ),
        *(
            ({"segments": segments}, r"its version segments .* do not cover 2 tokens")
            for segments in (
                [],
                [(0, 0, 1)],
                [(0, 1, 2)],
                [(0, 0, 3)],
                [(0, 0, 1), (0, 0, 2)],
                [(-2, 0, 2)],
                [(0, 0, 2), (0, 2, 2)],
                [(0, 0, -2), (0, -2, 2)],
            )
        ),
        ({"segments": [(0, 0, 1), (1, 1, 2)]}, r"versions up to that of the batch \(0\), got 1"),
        ({"num_context": 1}, r"num_context must be in \[0, 0\], got 1"),
        ({"new_rows": ((1, 1),)}, r"new_rows must be ascending places"),
        ({"new_rows": ((0, 1),)}, r"new_rows must be ascending places"),
        ({"sampled": [0, 0]}, r"observed must leave a completion token to train on"),
        (
            {"token_ids": [7] * 9, "logprobs": [-1.0] * 9, "segments": [(0, 0, 9)]},
            r"at most training\.seq_len \(10\) tokens, got 11",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_place(changes, message):
    check(batch(rollout()))
    with pytest.raises(DataError, match=message):
        check(batch(rollout(**changes)))


@pytest.mark.parametrize(
    ("position", "places"), [(-1, ()), (3, (3,)), (3, (2, 1)), (3, (1, 1)), (3, (-1, 1))]
)
def test_progress_that_cannot_be_is_refused(position, places):
    with pytest.raises(DataError, match=r"file:2: progress.open must be ascending"):
        check(batch(rollout(), position=position, open=places))


def test_groups_must_be_told_apart():
    (group,) = batch(rollout()).groups
    for groups, message in (
        ([group, group], r"file:2: group_id must be unique, got \[3, 3\]"),
        ([], r"a batch must have a group"),
        ([replace(group, rollouts=())], r"a group must have a rollout"),
    ):
        with pytest.raises(DataError, match=message):
            check(BatchRecord(0, PromptProgress(), groups))


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([[-1.0], [-1.0, -2.0]], r"rollout 0: its 1 teacher_logprobs are not one for each of 2"),
        ([[-1.0, -1e300], [-1.0, -2.0]], r"teacher_logprobs must be finite, above -9999"),
        ([[-1.0, -2.0], [-9999.0, -2.0]], r"rollout 1: teacher_logprobs .* got -9999.0 at token 0"),
        ([[-1.0, 0.5], [-1.0, -2.0]], r"rollout 0: teacher_logprobs must .* not above 0, got 0.5"),
        ([[-1.0, -2.0], None], r"all rollouts of a group must have teacher_logprobs.*got 1 of 2"),
    ],
)
def test_ratings_that_do_not_fit_their_group_are_refused(ratings, message):
    for fitting in ([None, None], [[-1.0, -2.0], [-3.0, -0.5]]):
        check(rated(*fitting))
    with pytest.raises(DataError, match=message):
        check(rated(*ratings))


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([[7, 1]], [[-1, -1]], r"rollout 0: its 1 teacher_top_ids are not one for each of 2"),
        (TOP["teacher_top_ids"], None, r"must have equally many values"),
        (TOP["teacher_top_ids"], [[-1], [-1]], r"must have equally many values"),
        (np.zeros((2, 0)), np.zeros((2, 0)), r"must have equally many values, at least one"),
        ([[7, 1], [8, 100]], [[-1, -1]] * 2, r"teacher_top_ids must be in \[0, 100\)"),
        ([[7, 1], [-8, 2]], [[-1, -1]] * 2, r"teacher_top_ids must be in"),
        ([[7, 1], [2, 2]], [[-1, -1]] * 2, r"teacher_top_ids must be different at each token"),
        (TOP["teacher_top_ids"], [[-1, -2], [-1, -np.inf]], r"teacher_top_logprobs must be finite"),
        (TOP["teacher_top_ids"], [[-1, -2], [-9999, -1]], r"must .* got -9999.0 at token 1"),
        (TOP["teacher_top_ids"], [[-1, 1e30], [-3, -1]], r"must be finite, .* at token 0"),
    ],
)
def test_most_likely_tokens_that_do_not_fit_their_rollout_are_refused(ids, logprobs, message):
    check(rated([-1.0, -2.0], **TOP))
    with pytest.raises(DataError, match=message):
        check(rated([-1.0, -2.0], teacher_top_ids=ids, teacher_top_logprobs=logprobs))


def test_all_rollouts_of_a_group_have_the_same_number_of_most_likely_tokens():
    rating = [-1.0, -2.0]
    mixed = batch(rollout(teacher_logprobs=rating, **TOP), rollout(teacher_logprobs=rating))
    with pytest.raises(DataError, match=r"same number of most likely tokens .* got \[0, 2\]"):
        check(mixed)
    with pytest.raises(DataError, match=r"and others none, got \[2\]"):
        check(rated(None, **TOP))


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("grpo", "filter_zero_advantage", True, r"grpo\.filter_zero_advantage = false, or set"),
        ("grpo", "off_policy_mask_threshold", 0.5, r"grpo\.off_policy_mask_threshold.*got 0\.5"),
        ("rollout", "temperature", 0.7, r"rollout\.temperature = 1, got 0\.7"),
    ],
)
def test_settings_that_would_lose_ratings_are_refused_while_these_teach(table, key, value, message):
    config, taught = JobConfig(), rated([-1.0, -2.0])
    check_ratings_are_used(taught, "file:2", config)
    setattr(getattr(config, table), key, value)
    check_ratings_are_used(rated(None), "file:2", config)
    with pytest.raises(DataError, match=rf"file:2, group 3: .*{message}"):
        check_ratings_are_used(taught, "file:2", config)
    config.teacher.coef = 0.0
    check_ratings_are_used(taught, "file:2", config)


def test_ratings_of_rollouts_with_rewritten_turns_are_refused():
    with pytest.raises(DataError, match=r"from their beginning, but one has new_rows"):
        check_ratings_are_used(rated([-1.0, -2.0], new_rows=((1, 1),)), "file:2", JobConfig())


@pytest.mark.parametrize(
    ("top", "message"),
    [({}, r"got none, .* Set teacher\.top_k = 0"), (TOP, r"\(3\), got 2, .* = 2")],
)
def test_a_replay_with_top_k_needs_as_many_tokens_in_the_file(top, message):
    config, found = JobConfig(), rated([-1.0, -2.0], **top)
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
    first, unrated = rollout(teacher_logprobs=[-1.0, -2.0]), rollout()
    path = tmp_path / "rollouts.jsonl"
    recorder = RolloutRecorder(str(path), model.vocab_size, 1.0, 0)
    pairs = enumerate((first, first if rates_second else unrated))
    recorder.write(0, PromptProgress(2), [RolloutGroup(i, "", (r, r), "") for i, r in pairs])
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
        with pytest.raises(DataError, match=r"group 1: .* has none, and a replay asks no server"):
            start()
