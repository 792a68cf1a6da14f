# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The loss of a microbatch, from the parts that ``[grpo]`` chooses, and its metrics.

::

    loss = sum over trained tokens of  loss_weight * (mismatch_weight * policy_loss
                                                      + kl_coef * kl - entropy_coef * entropy
                                                      + teacher.coef * teacher_kl)
         + sum over mixed-in tokens of ptx_weight * -logprob

Only the policy loss has the mismatch weight: KL penalty, entropy bonus and the teacher's part (with
``teacher.top_k``) also apply to tokens that the correction leaves out. These still count in the
denominator of the aggregation, which is part of ``loss_weight``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from torchtitan.grpo.config import GRPO, Teacher
from torchtitan.grpo.losses.distillation import TopLogprobs, top_k_reverse_kl
from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.loss_metrics import (
    Metric,
    Reduction,
    TokenMetric,
    loss_metric,
    mean_metric,
    token_metric,
)
from torchtitan.grpo.losses.mismatch import (
    MismatchWeights,
    mismatch_metrics,
    mismatch_weights,
    off_policy_sequences,
)
from torchtitan.grpo.losses.policy_function import example_inputs, policy_function
from torchtitan.grpo.losses.policy_terms import CLIPPED, PolicyInputs, PolicyTerm


def negative_log_likelihood(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of ``-logprob``, a scalar [].

    With the weight ``1 / n`` at each of ``n`` tokens of a batch, the sum over all microbatches and
    ranks is the batch's mean cross entropy. Both are [rows, seq], no weight below 0. Where a weight
    is 0, the logprob may be anything, NaN included, and its gradient is 0.
    """
    counts = weights > 0
    # Before the product, because 0 * NaN is NaN, in the loss and in its gradient.
    return -(torch.where(counts, weights, 0.0) * torch.where(counts, logprobs, 0.0)).sum()


@dataclass(frozen=True, kw_only=True)
class LossInputs(PolicyInputs):
    """Inputs of the loss: tensors [rows, seq], aligned to the predicted token (`data/rows.py`).

    At untrained tokens, all but ``sequence_ids`` and ``ptx_weights`` may hold anything, NaN
    included. ``old_logprobs`` are those before the batch's first optimizer step, whatever
    ``grpo.old_policy`` is.

    Attributes:
        ref_logprobs: float, of the reference model; None without one.
        loss_weights: float, see `advantages.py`.
        ptx_weights: float, above 0 on mixed-in supervised tokens and 0 elsewhere.
        teacher_top: The teacher's most likely tokens; None without ``teacher.top_k``.
    """

    ref_logprobs: torch.Tensor | None
    loss_weights: torch.Tensor
    ptx_weights: torch.Tensor
    teacher_top: TopLogprobs | None = None


def objective(
    inputs: LossInputs,
    config: GRPO,
    teacher: Teacher | None = None,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Returns a microbatch's loss [], to be summed over microbatches and ranks, and its metrics.

    Rows without a trained or mixed-in token give a loss of 0 with gradients of 0. The function
    computes in the inputs' dtype, and can be compiled with ``torch.compile(fullgraph=True)``.

    Raises ValueError if the shapes differ, or a setting needs a tensor that is None.
    """
    _check(inputs, config, teacher)
    clean = _without_untrained(inputs)
    policy_inputs = clean
    if config.old_policy == "sampling":
        policy_inputs = replace(clean, old_logprobs=clean.generator_logprobs)
    mismatch = _mismatch(clean, config)
    term = policy_function(config.policy_loss)(policy_inputs, config, **config.policy_loss_options)
    token_losses = torch.where(clean.loss_mask, term.token_losses, 0.0)
    policy_loss = (clean.loss_weights * mismatch.weights * token_losses).sum()
    ptx_loss = negative_log_likelihood(inputs.logprobs, inputs.ptx_weights)
    loss = policy_loss + ptx_loss
    reference_kl = torch.zeros_like(clean.loss_weights)
    if clean.ref_logprobs is not None:
        reference_kl = kl_estimate(clean.logprobs, clean.ref_logprobs, config.kl_estimator)
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * (clean.loss_weights * reference_kl).sum()
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (clean.loss_weights * clean.entropy).sum()
    of_teacher: dict[str, Metric] = {}
    if teacher is not None and (top := clean.teacher_top) is not None:
        teacher_kl = top_k_reverse_kl(top.student, top.teacher)
        of_teacher["teacher/top_k_kl"] = mean_metric(teacher_kl.sum(), top.is_rated.sum())
        loss = loss + teacher.coef * (clean.loss_weights * teacher_kl).sum()
    own = {
        "loss/total": loss_metric(loss),
        "loss/policy": loss_metric(policy_loss),
        "loss/ptx": loss_metric(ptx_loss),
        "loss/reference_kl": mean_metric(reference_kl.sum(), clean.loss_mask.sum()),
    }
    of_mismatch = mismatch_metrics(
        mismatch,
        _proximal(clean, config),
        clean.generator_logprobs,
        clean.loss_mask,
        clean.sequence_ids,
    )
    of_term = _term_metrics(term, clean.loss_mask, own)
    return loss, own | of_teacher | of_term | of_mismatch | _policy_metrics(policy_inputs)


def metric_reductions(config: GRPO, teacher: Teacher | None = None) -> dict[str, Reduction]:
    """Returns each metric's reduction, found with example inputs, for ranks that do not compute the loss."""
    example, top = example_inputs(), None
    if teacher is not None and teacher.top_k > 0:
        logprobs = example.logprobs.unsqueeze(-1)
        top = TopLogprobs(logprobs, logprobs, example.loss_mask)
    inputs = LossInputs(
        **vars(example),
        ref_logprobs=example.old_logprobs,
        loss_weights=example.loss_mask.float(),
        ptx_weights=torch.zeros_like(example.logprobs),
        teacher_top=top,
    )
    with torch.no_grad():
        _, metrics = objective(inputs, config, teacher=teacher)
    return {name: metric.reduction for name, metric in metrics.items()}


def _check(inputs: LossInputs, config: GRPO, teacher: Teacher | None) -> None:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    top = inputs.teacher_top
    if top is not None:
        tensors["teacher_top.is_rated"] = top.is_rated
    shapes = {n: tuple(t.shape) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    if len(set(shapes.values())) != 1 or inputs.logprobs.dim() != 2:
        raise ValueError(f"All inputs of the loss must have one shape [rows, seq], got {shapes}.")
    if inputs.ref_logprobs is None and config.kl_coef > 0 and config.kl_in == "loss":
        raise ValueError(
            f"ref_logprobs must be given with grpo.kl_coef = {config.kl_coef} and "
            "grpo.kl_in = 'loss', got None."
        )
    shape, top_k = inputs.logprobs.shape, 0 if teacher is None else teacher.top_k
    if (top is None) != (top_k == 0):
        got = "None" if top is None else "some"
        raise ValueError(
            f"teacher_top must be given with teacher.top_k above 0 and only then, got {got} with {top_k}."
        )
    if top is not None and not (
        top.student.shape == top.teacher.shape and top.student.shape[:-1] == shape
    ):
        raise ValueError(
            f"Logprobs of the teacher's tokens must be [{shape[0]}, {shape[1]}, k], got "
            f"{tuple(top.student.shape)} of the student and {tuple(top.teacher.shape)} of the teacher."
        )


def _without_untrained(inputs: LossInputs) -> LossInputs:
    """Returns the inputs with zeros at untrained tokens. Masking must come first, because 0 * NaN is NaN."""

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    ref_logprobs, top = inputs.ref_logprobs, inputs.teacher_top
    return replace(
        inputs,
        logprobs=masked(inputs.logprobs),
        entropy=masked(inputs.entropy),
        old_logprobs=masked(inputs.old_logprobs).detach(),
        generator_logprobs=masked(inputs.generator_logprobs),
        ref_logprobs=None if ref_logprobs is None else masked(ref_logprobs),
        advantages=masked(inputs.advantages),
        loss_weights=masked(inputs.loss_weights),
        teacher_top=None if top is None else top.only(inputs.loss_mask),
    )


def _proximal(clean: LossInputs, config: GRPO) -> torch.Tensor:
    """Returns the detached logprobs that the mismatch correction compares with sampling-time logprobs."""
    return clean.logprobs.detach() if config.old_policy == "sampling" else clean.old_logprobs


def _mismatch(clean: LossInputs, config: GRPO) -> MismatchWeights:
    mask, ids, generator = clean.loss_mask, clean.sequence_ids, clean.generator_logprobs
    mismatch = mismatch_weights(_proximal(clean, config), generator, mask, ids, config)
    policy, threshold = clean.logprobs.detach(), config.off_policy_mask_threshold
    off_policy = off_policy_sequences(policy, generator, clean.advantages, mask, ids, threshold)
    return mismatch.without(off_policy)


def _term_metrics(
    term: PolicyTerm, loss_mask: torch.Tensor, taken: Mapping[str, Metric]
) -> dict[str, Metric]:
    metrics = {CLIPPED: TokenMetric(torch.zeros_like(loss_mask), "mean")} | term.metrics
    for name in metrics:
        if name in taken:
            raise ValueError(
                f"grpo.policy_loss returns a metric {name!r}, which is the name of a metric of "
                "every loss. Choose another name."
            )
    return {name: token_metric(metric, loss_mask) for name, metric in metrics.items()}


def _policy_metrics(inputs: PolicyInputs) -> dict[str, Metric]:
    num_tokens = inputs.loss_mask.sum()
    approx_kl = kl_estimate(inputs.old_logprobs, inputs.logprobs, "k3")
    return {
        "policy/nll": mean_metric(-inputs.logprobs.sum(), num_tokens),
        "policy/approx_kl": mean_metric(approx_kl.sum(), num_tokens),
        "policy/entropy": mean_metric(inputs.entropy.sum(), num_tokens),
    }
