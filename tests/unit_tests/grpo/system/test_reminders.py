# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reminders of a wait come at growing distances."""

from torchtitan.grpo.system.reminders import Reminders


def test_reminders_come_at_growing_distances_up_to_the_longest() -> None:
    reminders = Reminders(first_seconds=5, longest_seconds=30)
    assert [t for t in range(200) if reminders.is_due(t)] == [5, 15, 35, 65, 95, 125, 155, 185]


def test_a_short_wait_has_none() -> None:
    assert not Reminders().is_due(4.9)
