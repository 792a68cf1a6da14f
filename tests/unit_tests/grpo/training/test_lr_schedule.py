# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The learning rate over a run, from ``[lr_scheduler]``."""

import logging

import pytest
import torch

from torchtitan.grpo.job_config import LRScheduler
from torchtitan.grpo.training.lr_schedule import build_lr_schedulers


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
