# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The learning rate over a run, from ``[lr_scheduler]``."""

import logging

import pytest
import torch

from torchtitan.grpo.job_config import LRScheduler
from torchtitan.grpo.training.lr_schedule import build_lr_schedulers, describe_shortened


def factors(steps: int, **settings) -> list[float]:
    """Returns the factor of the learning rate at each step of a run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedulers = build_lr_schedulers([optimizer], LRScheduler(**settings), steps)  # pyright: ignore
    found = []
    for _ in range(steps):
        found.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizer.step()
        schedulers.step()
    return found


def test_by_default_the_learning_rate_rises_for_ten_steps_and_stays():
    assert factors(20) == pytest.approx([*(i / 10 for i in range(1, 11)), *[1.0] * 10])


def test_a_longer_run_has_the_same_learning_rates_by_default():
    assert factors(30)[:20] == factors(20)


def test_a_ratio_of_one_decays_from_the_end_of_the_warm_up_and_warns_of_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        # A virtual last step keeps the last learning rate above 0.
        assert factors(6, warmup_steps=2, decay_ratio=1.0) == pytest.approx(
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        )
        assert factors(2, warmup_steps=10, decay_ratio=1.0) == pytest.approx([0.5, 1.0])
    assert not caplog.records


@pytest.mark.parametrize(
    ("steps", "settings", "said"),
    [
        (
            4,
            {"warmup_steps": 10},
            "has 4 steps, so it rises over 4 (lr_scheduler.warmup_steps is 10).",
        ),
        (
            1,
            {"warmup_steps": 2},
            "has 1 steps, so it rises over 1 (lr_scheduler.warmup_steps is 2).",
        ),
        (
            4,
            {"warmup_steps": 9, "decay_ratio": 1.0},
            "so it rises over 4 (lr_scheduler.warmup_steps is 9).",
        ),
        (
            10,
            {"warmup_steps": 4, "decay_ratio": 0.8},
            "has 10 steps, so it falls over 6 (lr_scheduler.decay_ratio, 0.8, would be 8).",
        ),
        (
            4,
            {"warmup_steps": 5, "decay_ratio": 0.5},
            "so it rises over 4 (lr_scheduler.warmup_steps is 5) and it falls over 0 "
            "(lr_scheduler.decay_ratio, 0.5, would be 2).",
        ),
        (4, {"warmup_steps": 4}, None),
        (10, {"warmup_steps": 2, "decay_ratio": 0.8}, None),
        (10, {"warmup_steps": 2, "decay_ratio": 1.0}, None),
        (10, {"warmup_steps": 0, "decay_ratio": None}, None),
    ],
)
def test_lengths_that_do_not_fit_are_told_as_what_is_used(steps, settings, said):
    found = describe_shortened(LRScheduler(**settings), steps)
    assert found is None if said is None else found is not None and found.endswith(said)
