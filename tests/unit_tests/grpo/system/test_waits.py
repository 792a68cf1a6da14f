# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The pause between attempts and the reminders of a wait grow up to a bound."""

from torchtitan.grpo.system.waits import Backoff, Reminders


def test_the_pause_doubles_up_to_the_longest_and_starts_again_after_a_success():
    backoff = Backoff(1.0, 5.0)
    assert [backoff.seconds_after_failure() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.seconds_after_failure() == 1.0
    backoff.num_failures = 10**6
    assert backoff.seconds_after_failure() == 5.0, "a float does not overflow"


def test_reminders_come_at_growing_distances_up_to_the_longest() -> None:
    reminders = Reminders(first_seconds=5, longest_seconds=30)
    assert [t for t in range(200) if reminders.is_due(t)] == [5, 15, 35, 65, 95, 125, 155, 185]
