# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from torchtitan.grpo.rollout.kept_groups import (
    BATCHES,
    EQUAL,
    FEWEST_GROUPS,
    NOT_ACCEPTED,
    TRUNCATED,
    UNSCORED,
    USUAL_GAPS,
    Cause,
    KeptGroups,
    NothingKept,
)


def drop_in_turn(groups: KeptGroups, first: int, number: int, cause: Cause = TRUNCATED) -> None:
    for group in range(first, first + number):
        groups.start(group)
        groups.drop(group, cause)


@pytest.mark.parametrize("groups_per_batch", [1, 31, 100])
def test_the_run_ends_after_groups_for_several_batches(groups_per_batch):
    groups = KeptGroups(groups_per_batch)
    bound = max(FEWEST_GROUPS, BATCHES * groups_per_batch)
    drop_in_turn(groups, 0, bound - 1)
    with pytest.raises(NothingKept, match=f"one of {bound} consecutive groups"):
        drop_in_turn(groups, bound, 1)


def test_the_message_counts_what_became_of_the_groups_and_names_the_settings():
    groups = KeptGroups(4)
    assert groups.describe() == ""
    drop_in_turn(groups, 0, 200)
    drop_in_turn(groups, 200, 50, UNSCORED)
    text = f"200 {TRUNCATED.words}, 50 {UNSCORED.words}"
    assert groups.describe() == f"since a group was kept last, {text}"
    with pytest.raises(NothingKept) as ended:
        drop_in_turn(groups, 250, 6, NOT_ACCEPTED)
    for part in (text, "6 had too few", "rollout.drop_truncated", "rollout.max_new_tokens",
                 "reward.functions", "rollout.should_accept"):  # fmt: skip
        assert part in str(ended.value)


def test_a_run_in_which_few_groups_are_kept_goes_on():
    groups = KeptGroups(4)
    rare = 100  # of so many groups one is kept
    for turn in range(10):
        drop_in_turn(groups, rare * turn, rare - 1)
        groups.start(rare * turn + rare - 1)
        groups.keep(rare * turn + rare - 1)
    assert groups.bound() == USUAL_GAPS * rare
    drop_in_turn(groups, 5000, USUAL_GAPS * rare - 1)
    with pytest.raises(NothingKept):
        drop_in_turn(groups, 9000, rare * USUAL_GAPS)


def test_groups_do_not_count_while_one_that_was_started_before_them_runs():
    groups = KeptGroups(4)
    groups.start(-1)  # long completions, perhaps kept
    drop_in_turn(groups, 0, 3 * FEWEST_GROUPS)
    with pytest.raises(NothingKept):
        groups.drop(-1, TRUNCATED)
    groups = KeptGroups(4)
    groups.start(-1)
    drop_in_turn(groups, 0, 3 * FEWEST_GROUPS)
    groups.keep(-1)
    drop_in_turn(groups, 1000, FEWEST_GROUPS - 1)


def test_what_dynamic_sampling_leaves_out_does_not_count():
    groups = KeptGroups(4)
    drop_in_turn(groups, 0, 10 * FEWEST_GROUPS, EQUAL)
    assert "2560 had rewards that are all equal" in groups.describe()
    drop_in_turn(groups, 5000, FEWEST_GROUPS - 1)
