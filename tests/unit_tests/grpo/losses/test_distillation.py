# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Distillation from a teacher: in advantages, and over its most likely tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchtitan.grpo.config import GRPO, Teacher
from torchtitan.grpo.losses.distillation import (
    TAIL_FLOOR,
    TopLogprobs,
    group_baselines,
    sample_sums,
    sampled_reverse_kl,
    top_k_reverse_kl,
    with_teacher,
)
from torchtitan.grpo.losses.loss_metrics import MetricTotals
from torchtitan.grpo.losses.objective import LossInputs, metric_reductions, objective
from torchtitan.grpo.losses.policy_terms import PolicyInputs, reinforce


def test_a_token_that_the_teacher_likes_less_has_a_negative_advantage():
    student = torch.tensor([[0.5, 0.25, 0.1]]).log()
    teacher = torch.tensor([[0.25, 0.5, 0.1]]).log()
    divergence = sampled_reverse_kl(student, teacher, torch.ones(1, 3, dtype=torch.bool))
    assert divergence.tolist()[0] == pytest.approx([math.log(2), -math.log(2), 0.0], abs=1e-6)
    rewards = torch.tensor([[1.0, 1.0, 1.0]])
    half = math.log(2) / 2
    found = with_teacher(rewards, divergence, coef=0.5)
    assert found.tolist()[0] == pytest.approx([1 - half, 1 + half, 1.0], abs=1e-6)
    assert torch.equal(with_teacher(rewards, divergence, coef=0.0), rewards)


def test_the_baseline_is_the_mean_over_the_tokens_of_a_group():
    divergence = torch.tensor([[0.0, 2.0, 4.0, 0.0, 1.0, 9.0]])
    sample_ids = torch.tensor([[0, 0, 0, 1, 1, -1]])
    sums = sample_sums(divergence, sample_ids, 3)
    assert sums.tolist() == [6.0, 1.0, 0.0]
    lengths, groups = np.array([2, 1, 0]), np.array([7, 7, 3])
    assert group_baselines(sums.numpy(), lengths, groups).tolist() == pytest.approx(
        [7 / 3, 7 / 3, 0]
    )


def test_tokens_that_are_not_trained_or_not_rated_count_nothing_and_a_bound_holds_on_both_sides():
    student = torch.tensor([[-1.0, 0.0, torch.nan, -9.0, -0.5]])
    teacher = torch.tensor([[-3.0, torch.nan, -1.0, -1.0, -9.0]])
    mask = torch.tensor([[True, True, False, True, True]])
    assert sampled_reverse_kl(student, teacher, mask).tolist() == [[2.0, 0.0, 0.0, -8.0, 8.5]]
    bounded = sampled_reverse_kl(student, teacher, mask, max_divergence=5.0)
    assert bounded.tolist() == [[2.0, 0.0, 0.0, -5.0, 5.0]]


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence(baseline):
    """All tokens of a vocabulary, each weighted by its probability, are one exact expectation."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    divergence = (student - teacher).detach()[None]
    inputs = PolicyInputs(
        logprobs=student[None], old_logprobs=student.detach()[None],
        generator_logprobs=student.detach()[None],
        advantages=with_teacher(torch.full_like(divergence, baseline), divergence, coef=1.0),
        entropy=torch.zeros_like(divergence), loss_mask=torch.ones(1, 6, dtype=torch.bool),
        sequence_ids=torch.zeros(1, 6, dtype=torch.int64),
    )  # fmt: skip
    losses = reinforce(inputs, GRPO()).token_losses
    (found,) = torch.autograd.grad((student.detach().exp() * losses[0]).sum(), logits)

    def kl(values: torch.Tensor) -> float:
        policy = values.log_softmax(-1)
        return float((policy.exp() * (policy - teacher)).sum())

    step = 1e-5
    base = logits.detach()
    for i in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[i] = step
        expected = (kl(base + shift) - kl(base - shift)) / (2 * step)
        assert found[i].item() == pytest.approx(expected, abs=1e-8)


# ---- over the teacher's most likely tokens

TEACHER = Teacher(coef=0.5, top_k=2)


def test_the_divergence_over_the_top_tokens_is_that_worked_out_by_hand():
    student, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    # 0.5 log 2 - 0.25 log 2, and the same rest of 0.25.
    assert top_k_reverse_kl(student, teacher).item() == pytest.approx(0.25 * math.log(2), rel=1e-6)
    teacher = torch.tensor([[0.25, 0.25]]).log()
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert top_k_reverse_kl(student, teacher).item() == pytest.approx(expected, rel=1e-6)
    assert top_k_reverse_kl(student, student).item() == 0


def distributions(vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, 7, vocab, dtype=torch.float64)
    return logits[0].requires_grad_(), logits[1].log_softmax(-1)


def test_the_whole_vocabulary_gives_the_whole_divergence_and_its_gradient():
    logits, teacher = distributions()
    student = logits.log_softmax(-1)
    expected = F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    found = top_k_reverse_kl(student, teacher)
    torch.testing.assert_close(found, expected)
    ours, theirs = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected)
    )
    # The student's probabilities sum to 1 whatever the logits are: the floor of the rest adds nothing.
    torch.testing.assert_close(ours, theirs)


def test_its_gradient_is_that_of_finite_differences():
    logits, teacher = distributions()
    assert torch.autograd.gradcheck(
        lambda x: top_k_reverse_kl(x.log_softmax(-1)[:, :3], teacher[:, :3]), (logits,)
    )


@pytest.mark.parametrize("student_rest", [0.0, 1e-9, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("teacher_rest", [-1e-6, 0.0, 1e-9, 0.5])
def test_values_and_gradients_are_finite_where_nothing_is_left(student_rest, teacher_rest):
    """Also for a student's probability of 0, and a sum that rounding has put above 1."""
    student = torch.tensor([1 - student_rest, 0.0]).log().requires_grad_()
    teacher = torch.tensor([(1 - teacher_rest) / 2] * 2).log()
    found = top_k_reverse_kl(student, teacher)
    found.backward()
    assert found.isfinite() and student.grad is not None and student.grad.isfinite().all()
    assert student.grad[1] == 0
    p, t = 1 - student_rest, (1 - teacher_rest) / 2
    rest, other_rest = max(student_rest, TAIL_FLOOR), max(teacher_rest, TAIL_FLOOR)
    expected = (p * math.log(p / t) if p else 0) + rest * math.log(rest / other_rest)
    # Float32 knows a rest near the floor to a few percent.
    assert found.item() == pytest.approx(expected, rel=0.02, abs=1e-4)


def loss_inputs(lab, config: GRPO) -> tuple[LossInputs, TopLogprobs]:
    """Sequences in rows, all but one of them rated, with NaN where nothing is trained or rated."""
    packed = lab.pack(lab.make_sequences(0), [[0, 1], [2], [3], []], 24, config, junk=0.0)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, *packed.loss_mask.shape, 9, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)[..., :3]
    is_rated = packed.loss_mask.clone()
    is_rated[1] = False
    student[~is_rated], teacher[~is_rated] = math.nan, math.nan
    is_rated[3] = True  # a rating alone trains nothing
    # Dynamo looks at the gradients of its inputs.
    bare = replace(packed, logprobs=packed.logprobs.detach(), entropy=packed.entropy.detach())
    top = TopLogprobs(student, teacher, is_rated)
    return replace(bare, teacher_top=top), top


def test_it_is_added_with_its_coefficient_and_the_aggregation_s_weights(lab):
    config = GRPO(aggregation="sequence_mean")
    inputs, top = loss_inputs(lab, config)
    loss, metrics = objective(inputs, config, teacher=TEACHER)
    without, _ = objective(replace(inputs, teacher_top=None), config)
    where = top.is_rated & inputs.loss_mask
    assert 0 < where.sum() < inputs.loss_mask.sum()
    kl = top_k_reverse_kl(top.student[where], top.teacher[where])
    torch.testing.assert_close(loss - without, 0.5 * (inputs.loss_weights[where] * kl).sum())
    totals = MetricTotals(metric_reductions(config, TEACHER))
    totals.add([metrics])
    assert totals.values(1)["teacher/top_k_kl"] == pytest.approx(float(kl.detach().mean()))
    assert "teacher/top_k_kl" not in metric_reductions(config, Teacher())
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs, config, TEACHER)[0], loss)


def test_tokens_of_a_teacher_that_are_missing_or_do_not_fit_are_refused(lab):
    inputs, top = loss_inputs(lab, GRPO())
    for given, teacher, message in (
        (None, TEACHER, "only then, got None with 2"),
        (top, None, "only then, got some with 0"),
        (replace(top, teacher=top.teacher[..., :2]), TEACHER, r"must be \[4, 24, k\]"),
        (replace(top, is_rated=top.is_rated[:1]), TEACHER, "one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            objective(replace(inputs, teacher_top=given), GRPO(), teacher=teacher)
