# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shares of time, with a clock that the test sets."""

from torchtitan.grpo.rollout.idle_shares import IdleShares, ShareClock


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_share_covers_the_time_since_it_was_last_taken():
    clock = Clock()
    share = ShareClock(clock)
    clock.seconds = 103.0
    share.set(True)
    share.set(True)
    clock.seconds = 104.0
    assert share.take() == 0.25
    clock.seconds = 106.0  # it still holds
    share.set(False)
    clock.seconds = 108.0
    assert share.take() == 0.5
    assert share.take() == 0.0  # no time has passed


def test_idle_and_held_back_are_counted_apart():
    clock = Clock()
    shares = IdleShares(clock)
    shares.note(is_idle=True, is_held_back=False)
    clock.seconds += 1
    shares.note(is_idle=False, is_held_back=True)
    clock.seconds += 3
    assert shares.take_metrics() == {
        "rollout/idle_fraction": 0.25,
        "rollout/wait_trainer_fraction": 0.75,
    }
