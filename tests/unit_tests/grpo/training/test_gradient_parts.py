# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gradients of parts become that of their step."""

import numpy as np
import torch

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.data.step_plan import SampleTable
from torchtitan.grpo.losses.loss_metrics import Metric, MetricTotals
from torchtitan.grpo.training.learner import GradientParts
from torchtitan.grpo.types import BatchPart, PromptProgress

NO_SAMPLES = SampleTable(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def part(mass: int, *, is_last: bool = False) -> TrainBatch:
    return TrainBatch(
        minibatches=[],
        minibatch_tokens=[10 * mass],
        samples=NO_SAMPLES,
        num_trained_tokens=10 * mass,
        num_tokens=20 * mass,
        mass=mass,
        part=BatchPart.LAST if is_last else BatchPart.MIDDLE,
        publish_slot=3 if is_last else 0,
        progress=PromptProgress(7),
    )


def test_the_sum_is_the_parts_mean_by_mass():
    totals = MetricTotals({"loss/total": "loss", "loss/tokens": "sum"})
    gradient = GradientParts(totals)
    weight, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(2)
    # A part's own gradient and loss; the second has nothing to learn from.
    for index, (mass, own) in enumerate([(0, 99.0), (6, 1.0), (0, 99.0), (2, 5.0)]):
        scale = gradient.scale_of(part(mass, is_last=index == 3))
        if scale:
            weight.grad += scale * torch.tensor([own, -own])
            of_part = {
                "loss/total": Metric("loss", (torch.tensor(own),)),
                "loss/tokens": Metric("sum", (torch.tensor(10 * mass),)),
            }
            totals.add([of_part], scale)
    gradient.finish([weight, unused])
    expected = (6 * 1.0 + 2 * 5.0) / 8
    torch.testing.assert_close(weight.grad, torch.tensor([expected, -expected]))
    assert totals.values(1) == {"loss/total": expected, "loss/tokens": 80}
    whole = gradient.whole()
    assert (whole.num_tokens, whole.num_trained_tokens) == (160, 80)
    assert (whole.part, whole.publish_slot) == (BatchPart.LAST, 3)


def test_a_step_without_anything_to_learn_from_is_empty():
    gradient = GradientParts(MetricTotals({}))
    assert gradient.scale_of(part(0)) == gradient.scale_of(part(0, is_last=True)) == 0
    assert gradient.is_empty
