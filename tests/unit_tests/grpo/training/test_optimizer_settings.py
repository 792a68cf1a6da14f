# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The learning rate's schedule, and the optimizer's settings after a checkpoint is loaded."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.grpo.job_config import LRScheduler
from torchtitan.grpo.training.lr_schedule import (
    build_lr_schedulers,
    renew_settings,
    schedule_of,
    settings_of,
)
from torchtitan.grpo.upstream.trainer import OptimizersContainer


def build(
    lr: float, warmup_steps: int = 2, num_steps: int = 10, **settings: Any
) -> SimpleNamespace:
    model = torch.nn.Linear(2, 2)
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1} | settings
    optimizers = OptimizersContainer([model], torch.optim.AdamW, options)
    config = LRScheduler(warmup_steps=warmup_steps, decay_ratio=None)
    schedulers = build_lr_schedulers(optimizers, config, num_steps, num_steps=num_steps)
    return SimpleNamespace(model=model, optimizers=optimizers, schedulers=schedulers)


def take_steps(run: SimpleNamespace, count: int) -> list[float]:
    """Takes optimizer steps; returns the learning rate of each."""
    rates = []
    for _ in range(count):
        rates.append(run.schedulers.schedulers[0].get_last_lr()[0])
        run.model(torch.ones(2)).sum().backward()
        run.optimizers.step()
        run.schedulers.step()
    return rates


def load(run: SimpleNamespace, other: SimpleNamespace) -> tuple[float, float]:
    """Loads the state of another run, as a checkpoint does, and renews the settings."""
    settings = settings_of(run.optimizers)
    run.optimizers.load_state_dict(copy.deepcopy(other.optimizers.state_dict()))
    run.schedulers.load_state_dict(copy.deepcopy(other.schedulers.state_dict()))
    return renew_settings(run.optimizers, run.schedulers, settings)


def test_the_last_rate_is_held_after_the_schedule():
    factor = schedule_of(LRScheduler(warmup_steps=2, decay_ratio=None), 5)
    assert [factor(n) for n in range(8)] == pytest.approx(
        [0.5, 1, 1, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
    )
    constant = schedule_of(LRScheduler(warmup_steps=20, decay_ratio=0.5), 4)
    assert [constant(n) for n in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_loaded_optimizer_has_the_settings_of_its_own_run_and_the_moments_of_the_checkpoint():
    old = build(1e-2)
    take_steps(old, 3)
    new = build(5e-3, betas=(0.8, 0.9), weight_decay=0.0)
    rate, brought = load(new, old)
    (group,) = new.optimizers.optimizers[0].param_groups
    (before,) = old.optimizers.optimizers[0].param_groups
    assert (group["betas"], group["weight_decay"], group["initial_lr"]) == ((0.8, 0.9), 0.0, 5e-3)
    assert (rate, brought) == (pytest.approx(before["lr"] / 2), before["lr"])
    moments, before_moments = (list(x.optimizers.optimizers[0].state.values()) for x in (new, old))
    for mine, theirs in zip(moments, before_moments, strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert float(mine["step"]) == 3
    rates, expected = take_steps(new, 6), take_steps(build(5e-3), 9)[3:]
    assert rates == pytest.approx(expected)


def test_a_schedule_that_is_set_anew_counts_from_the_next_step_on():
    old = build(1e-2, num_steps=6)
    take_steps(old, 5)
    new = build(1e-2, warmup_steps=0, num_steps=20)
    load(new, old)
    assert take_steps(new, 2) == pytest.approx(take_steps(build(1e-2, 0, 20), 7)[5:])
