"""A file's ratings must fit its rollouts, and the settings under which they are trained on."""

import pytest

from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.data.record import GroupRecord, RolloutRecord
from torchtitan.grpo.data.recorded_ratings import check_ratings, check_taught_settings
from torchtitan.grpo.job_config import JobConfig

FITTING = [-1.5, -2.5]


def group(*ratings) -> GroupRecord:
    return GroupRecord(
        3,
        [5, 6],
        [
            RolloutRecord([7, 8], [-1.0, -2.0], [(0, 0, 2)], 1.0, teacher_logprobs=rating)
            for rating in ratings
        ],
    )


def test_ratings_that_fit_are_taken_and_may_be_absent_without_a_teacher():
    check_ratings(group(FITTING, FITTING), "file:2", are_needed=True)
    check_ratings(group(None, None), "file:2", are_needed=False)


@pytest.mark.parametrize("are_needed", [True, False])
@pytest.mark.parametrize(
    ("rating", "message"),
    [
        (
            [-1.0],
            r"rollout 1: each of the 2 completion tokens must have a teacher's logprob, got 1",
        ),
        ([-1.0] * 3, r"must have a teacher's logprob, got 3"),
        ([-1.0, float("nan")], r"rollout 1: teacher_logprobs must be finite in float32"),
        ([-1.0, -1e300], r"teacher_logprobs must be finite in float32"),
        ([-1.0, float("-inf")], r"teacher_logprobs must be finite in float32"),
    ],
)
def test_a_rating_that_does_not_fit_is_refused_with_its_place(rating, message, are_needed):
    with pytest.raises(DataError, match=message):
        check_ratings(group(FITTING, rating), "file:2, group 3", are_needed=are_needed)


def test_a_group_is_rated_as_a_whole_or_not_at_all():
    with pytest.raises(DataError, match=r"group 3: all rollouts .* or none, .* got 1 of 2"):
        check_ratings(group(FITTING, None), "group 3", are_needed=False)
    for ratings, num_missing in (((FITTING, None), 1), ((None, None), 2)):
        message = (
            rf"group 3: each rollout must have a teacher's rating .* {num_missing} of 2 have none"
        )
        with pytest.raises(DataError, match=message):
            check_ratings(group(*ratings), "group 3", are_needed=True)


@pytest.mark.parametrize(
    ("table", "name", "value", "message"),
    [
        (
            "grpo",
            "off_policy_mask_threshold",
            0.5,
            r"off_policy_mask_threshold must be 0 .* got 0\.5",
        ),
        ("rollout", "temperature", 0.7, r"rollout\.temperature = 1, got 0\.7"),
    ],
)
def test_settings_that_would_spoil_ratings_are_refused_where_these_count(
    table, name, value, message
):
    config = JobConfig()
    setattr(getattr(config, table), name, value)
    check_taught_settings([group(None)], "file:2", config)
    with pytest.raises(DataError, match=rf"file:2: .*{message}.*teacher\.coef = 0"):
        check_taught_settings([group(None), group(FITTING)], "file:2", config)
    config.teacher.coef = 0.0
    check_taught_settings([group(FITTING)], "file:2", config)


def test_a_rated_rollout_that_went_on_in_another_context_is_refused():
    rated = group(FITTING)
    rated.rollouts[0].new_rows = [(1, 0)]
    with pytest.raises(DataError, match=r"file:2: .* must have no new_rows"):
        check_taught_settings([rated], "file:2", JobConfig())
    rated.rollouts[0].teacher_logprobs = None
    check_taught_settings([rated], "file:2", JobConfig())
