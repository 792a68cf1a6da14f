# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The pause after each of several failures in a row."""

import pytest

from torchtitan.grpo.system.backoff import Backoff


def test_the_pause_doubles_up_to_the_longest_and_starts_again_after_a_success():
    backoff = Backoff(1.0, 5.0)
    assert [backoff.seconds_after_failure() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.seconds_after_failure() == 1.0


def test_the_pause_stays_finite_after_any_number_of_failures():
    backoff = Backoff(0.5, 30.0)
    backoff.num_failures = 10**6
    assert backoff.seconds_after_failure() == 30.0


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_a_pause_that_cannot_be_is_refused(seconds):
    with pytest.raises(ValueError, match="at most longest_seconds"):
        Backoff(*seconds)
