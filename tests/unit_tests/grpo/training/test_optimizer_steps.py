# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The learning rate over a run and after a checkpoint, and gradients of parts of a step."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan.grpo.config.frame import LRScheduler
from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.data.step_plan import SampleTable
from torchtitan.grpo.losses.loss_metrics import Metric
from torchtitan.grpo.training.learner import GradientParts, Learner
from torchtitan.grpo.training.lr_schedule import (
    build_lr_schedulers,
    describe_shortened,
    renew_settings,
    schedule_of,
    settings_of,
)
from torchtitan.grpo.training.optimizers import Optimizers
from torchtitan.grpo.training.trainee import Trainee
from torchtitan.grpo.types import BatchPart, PromptProgress


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


def test_a_ratio_of_one_decays_from_the_end_of_the_warm_up_and_warns_of_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        # A virtual last step keeps the last learning rate above 0.
        assert factors(6, warmup_steps=2, decay_ratio=1.0) == pytest.approx(
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        )
        assert factors(2, warmup_steps=10, decay_ratio=1.0) == pytest.approx([0.5, 1.0])
    assert not caplog.records


@pytest.mark.parametrize(
    ("steps", "warmup", "decay", "said"),
    [
        (4, 10, None, "has 4 steps, so it rises over 4 (lr_scheduler.warmup_steps is 10)."),
        (4, 9, 1.0, "so it rises over 4 (lr_scheduler.warmup_steps is 9)."),
        (10, 4, 0.8, "so it falls over 6 (lr_scheduler.decay_ratio, 0.8, would be 8)."),
        (4, 5, 0.5, "(lr_scheduler.warmup_steps is 5) and it falls over 0 "
         "(lr_scheduler.decay_ratio, 0.5, would be 2)."),
        (4, 4, None, None),
        (10, 2, 0.8, None),
        (10, 2, 1.0, None),
        (10, 0, None, None),
    ],
)  # fmt: skip
def test_lengths_that_do_not_fit_are_told_as_what_is_used(steps, warmup, decay, said):
    settings = LRScheduler(warmup_steps=warmup, decay_ratio=decay)
    found = describe_shortened(settings, steps)
    assert found is None if said is None else found is not None and found.endswith(said)


def build(lr: float, warmup_steps: int = 2, num_steps: int = 10, **settings) -> SimpleNamespace:
    model = torch.nn.Linear(2, 2)
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1} | settings
    optimizers = Optimizers([model], [(torch.optim.AdamW(model.parameters(), **options),)])
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


NO_SAMPLES = SampleTable(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def part(mass: int, *, is_last: bool = False) -> TrainBatch:
    return TrainBatch(
        minibatches=[], minibatch_tokens=[10 * mass], samples=NO_SAMPLES,
        num_trained_tokens=10 * mass, num_tokens=20 * mass, mass=mass,
        part=BatchPart.LAST if is_last else BatchPart.MIDDLE, publish_slot=3 if is_last else 0,
        progress=PromptProgress(7),
    )  # fmt: skip


class OneLoss(Trainee):
    loss: Any = None


def test_the_sum_is_the_parts_mean_by_mass():
    gradient, run = GradientParts(), build(1e-2)
    clipper: Any = SimpleNamespace(parameters=run.model.parameters)
    trainee = OneLoss(
        runner=None, parts=[run.model], optimizers=run.optimizers, schedulers=run.schedulers,
        clipper=clipper, reductions={"loss/total": "loss", "loss/tokens": "sum"}, is_counted=True,
    )  # fmt: skip
    bias = run.model.bias  # the weight has no gradient
    bias.grad = torch.zeros(2)
    # A part's own gradient and loss; the second has nothing to learn from.
    for index, (mass, own) in enumerate([(0, 99.0), (6, 1.0), (0, 99.0), (2, 5.0)]):
        scale = gradient.scale_of(part(mass, is_last=index == 3))
        if scale:
            bias.grad += scale * torch.tensor([own, -own])
            of_part = {
                "loss/total": Metric("loss", (torch.tensor(own),)),
                "loss/tokens": Metric("sum", (torch.tensor(10 * mass),)),
            }
            trainee.of_update.add([of_part], scale)
    trainee.scale_gradient(gradient.last_scale)
    expected = (6 * 1.0 + 2 * 5.0) / 8
    torch.testing.assert_close(bias.grad, torch.tensor([expected, -expected]))
    assert trainee.of_update.values(1) == {"loss/total": expected, "loss/tokens": 80}
    whole = gradient.whole()
    assert (whole.num_tokens, whole.num_trained_tokens) == (160, 80)
    assert (whole.part, whole.publish_slot) == (BatchPart.LAST, 3)


def test_a_step_that_ends_early_leaves_no_gradient():
    run = build(1e-2)

    def add_gradient(*_: Any) -> None:
        run.model.bias.grad = torch.ones(2)

    trainee = OneLoss(
        runner=SimpleNamespace(begin_step=lambda step: None, forward_backward=add_gradient),  # pyright: ignore
        parts=[run.model], optimizers=run.optimizers, schedulers=run.schedulers, clipper=None,  # pyright: ignore
        reductions={}, is_counted=False,
    )  # fmt: skip
    trainee.loss = lambda minibatch, scale: None
    scorer: Any = SimpleNamespace(score=lambda *_, **__: [SimpleNamespace(rows=None)])
    guards: Any = None
    learner = Learner(scorer, [trainee], guards, lambda what: None, lambda: None)
    assert learner.learn_in_parts(part(6), 1, lambda: None) is None
    assert run.model.bias.grad is None


def test_a_step_without_anything_to_learn_from_is_empty():
    gradient = GradientParts()
    assert gradient.scale_of(part(0)) == gradient.scale_of(part(0, is_last=True)) == 0
    assert gradient.is_empty
