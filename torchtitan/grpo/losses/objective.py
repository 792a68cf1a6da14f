# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The loss of a microbatch, from the parts that ``[grpo]`` chooses, and sums for metrics.

::

    loss = sum over trained tokens of  loss_weight * (mismatch_weight * policy_loss
                                                      + kl_coef * kl - entropy_coef * entropy)
         + sum over mixed-in tokens of ptx_weight * -logprob

The mismatch weight is of the policy loss alone: what keeps the policy near its reference,
or its entropy up, holds on tokens that the correction leaves out, too. A token left out
keeps its place in the aggregation's denominator, which is in ``loss_weight``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.mismatch import MismatchWeights, mismatch_weights
from torchtitan.grpo.losses.policy_function import policy_function
from torchtitan.grpo.losses.policy_terms import PolicyInputs, PolicyTerm
from torchtitan.grpo.losses.sequences import sequence_sums


@dataclass(frozen=True)
class LossInputs:
    """All [rows, seq], aligned to the predicted token (``data/rows.py``).

    Where a token is not trained, the tensors may hold anything, NaN included, except for
    ``sequence_ids`` and ``ptx_weights``.

    Attributes:
        logprobs: float, of the labels under the current policy; carries gradients.
        entropy: float, of the current policy's distribution; carries gradients. 0 where it
            is not asked for.
        old_logprobs: float, of the policy before the batch's first optimizer step,
            detached. With one update a batch, ``logprobs.detach()``.
        generator_logprobs: float, recorded at sampling time.
        ref_logprobs: float, of the reference model; None without one.
        advantages: float, constant within a sequence.
        loss_mask: bool, True on trained tokens of rollouts.
        loss_weights: float, see ``aggregation.py``.
        ptx_weights: float, above 0 on mixed-in supervised tokens, else 0: it is their mask.
        sequence_ids: int64, row-local, from 0 and below ``seq``.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    generator_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor
    ptx_weights: torch.Tensor
    sequence_ids: torch.Tensor


SUM_NAMES = (
    "num_tokens", "num_sequences", "total_loss", "policy_loss", "ptx_loss", "reference_kl",
    "mismatch_kl", "approx_kl", "clipped", "dual_clipped", "capped", "masked",
    "vetoed_sequences", "weight", "weight_squared", "entropy", "nll",
)  # fmt: skip
"""What :func:`objective` sums, in this order: the three losses weighted, as they enter the
gradient, the rest over trained tokens (or sequences), each counting 1."""

_LOSSES = ("total_loss", "policy_loss", "ptx_loss")


def objective(inputs: LossInputs, config: GRPO) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a microbatch, to be summed over microbatches and ranks.

    Rows without a trained or mixed-in token give 0, with gradients of 0. Runs in the
    inputs' dtype, and under ``torch.compile(fullgraph=True)``.

    Args:
        inputs: The microbatch.
        config: ``[grpo]``.

    Returns:
        Scalar [] loss, and detached [len(SUM_NAMES)] float64 sums for
        :func:`metrics_from_sums`.

    Raises:
        ValueError: The shapes differ, or a setting asks for a tensor that is None.
    """
    _check(inputs, config)
    clean = _without_untrained(inputs)
    policy_inputs = _policy_inputs(clean, config)
    mismatch = _mismatch(clean, config)
    term = policy_function(config.policy_loss)(policy_inputs, config)
    token_losses = torch.where(clean.loss_mask, term.token_losses, 0.0)
    policy_loss = (clean.loss_weights * mismatch.weights * token_losses).sum()
    ptx_loss = _ptx_loss(inputs)
    loss = policy_loss + ptx_loss
    reference_kl = torch.zeros_like(clean.loss_weights)
    if clean.ref_logprobs is not None:
        reference_kl = kl_estimate(clean.logprobs, clean.ref_logprobs, config.kl_estimator)
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * (clean.loss_weights * reference_kl).sum()
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (clean.loss_weights * clean.entropy).sum()
    sums = {"total_loss": loss, "policy_loss": policy_loss, "ptx_loss": ptx_loss,
            "reference_kl": reference_kl.sum(), "entropy": clean.entropy.sum(),
            "nll": -clean.logprobs.sum()}  # fmt: skip
    sums |= _policy_sums(policy_inputs, term) | _mismatch_sums(clean, mismatch, config)
    return loss, torch.stack([sums[name].detach().double() for name in SUM_NAMES])


def metrics_from_sums(sums: Sequence[float], num_optimizer_steps: int = 1) -> dict[str, float]:
    """Metrics of a batch.

    ``loss/total``, ``loss/policy`` and ``loss/ptx`` are what was minimised, averaged over
    the batch's optimizer steps; the rest are means over trained tokens, each counting 1
    (``mismatch/vetoed_fraction``: over sequences). All are 0 where there was no trained
    token. ``policy/entropy`` is left out where no entropy was computed.

    Args:
        sums: [len(SUM_NAMES)], added over microbatches, ranks and optimizer steps.
        num_optimizer_steps: Of the batch.
    """
    total = dict(zip(SUM_NAMES, sums, strict=True))
    tokens = max(total["num_tokens"], 1.0)
    effective = total["weight"] ** 2 / max(tokens * total["weight_squared"], 1e-300)
    metrics = {
        "loss/total": total["total_loss"] / num_optimizer_steps,
        "loss/policy": total["policy_loss"] / num_optimizer_steps,
        "loss/ptx": total["ptx_loss"] / num_optimizer_steps,
        "loss/reference_kl": total["reference_kl"] / tokens,
        "loss/clipped_fraction": total["clipped"] / tokens,
        "loss/dual_clipped_fraction": total["dual_clipped"] / tokens,
        "mismatch/kl": total["mismatch_kl"] / tokens,
        "mismatch/effective_sample_size": effective,
        "mismatch/capped_fraction": total["capped"] / tokens,
        "mismatch/masked_fraction": total["masked"] / tokens,
        "mismatch/vetoed_fraction": total["vetoed_sequences"] / max(total["num_sequences"], 1.0),
        "policy/nll": total["nll"] / tokens,
        "policy/approx_kl": total["approx_kl"] / tokens,
        "policy/entropy": total["entropy"] / tokens,
    }
    if total["entropy"] == 0:  # of a real distribution it is above 0
        del metrics["policy/entropy"]
    return metrics


def scale_losses(sums: torch.Tensor, factor: float) -> torch.Tensor:
    """[len(SUM_NAMES)] ``sums`` of a loss that was multiplied by ``factor``."""
    factors = torch.ones_like(sums)
    factors[[SUM_NAMES.index(name) for name in _LOSSES]] = factor
    return sums * factors


def _check(inputs: LossInputs, config: GRPO) -> None:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) != 1 or inputs.logprobs.dim() != 2:
        raise ValueError(f"All inputs of the loss must have one shape [rows, seq], got {shapes}.")
    if inputs.ref_logprobs is None and config.kl_coef > 0 and config.kl_in == "loss":
        raise ValueError(
            f"ref_logprobs must be given with grpo.kl_coef = {config.kl_coef} and "
            "grpo.kl_in = 'loss', got None."
        )


def _without_untrained(inputs: LossInputs) -> LossInputs:
    """Zeros where nothing is trained.

    Before any arithmetic: 0 * NaN would be NaN, in the loss and in its gradient.
    """

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    ref_logprobs = inputs.ref_logprobs
    return LossInputs(
        logprobs=masked(inputs.logprobs),
        entropy=masked(inputs.entropy),
        old_logprobs=masked(inputs.old_logprobs).detach(),
        generator_logprobs=masked(inputs.generator_logprobs),
        ref_logprobs=None if ref_logprobs is None else masked(ref_logprobs),
        advantages=masked(inputs.advantages),
        loss_mask=inputs.loss_mask,
        loss_weights=masked(inputs.loss_weights),
        ptx_weights=inputs.ptx_weights,
        sequence_ids=inputs.sequence_ids,
    )


def _policy_inputs(clean: LossInputs, config: GRPO) -> PolicyInputs:
    on_sampling = config.old_policy == "sampling"
    return PolicyInputs(
        logprobs=clean.logprobs,
        old_logprobs=clean.generator_logprobs if on_sampling else clean.old_logprobs,
        generator_logprobs=clean.generator_logprobs,
        advantages=clean.advantages,
        entropy=clean.entropy,
        loss_mask=clean.loss_mask,
        sequence_ids=clean.sequence_ids,
    )


def _proximal(clean: LossInputs, config: GRPO) -> torch.Tensor:
    """What is compared to the sampling-time policy, detached."""
    return clean.logprobs.detach() if config.old_policy == "sampling" else clean.old_logprobs


def _mismatch(clean: LossInputs, config: GRPO) -> MismatchWeights:
    # Against the sampling-time policy itself the ratio is the whole correction.
    on_sampling = config.old_policy == "sampling"
    return mismatch_weights(
        _proximal(clean, config),
        clean.generator_logprobs,
        clean.loss_mask,
        clean.sequence_ids,
        correction="none" if on_sampling else config.mismatch_correction,
        level=config.mismatch_level,
        cap=config.importance_cap,
        floor=config.importance_floor,
        veto=0.0 if on_sampling else config.mismatch_veto,
    )


def _ptx_loss(inputs: LossInputs) -> torch.Tensor:
    mixed_in = inputs.ptx_weights > 0
    weights = torch.where(mixed_in, inputs.ptx_weights, 0.0)
    return -(weights * torch.where(mixed_in, inputs.logprobs, 0.0)).sum()


def _policy_sums(inputs: PolicyInputs, term: PolicyTerm) -> dict[str, torch.Tensor]:
    mask = inputs.loss_mask
    per_sequence = sequence_sums(mask.to(inputs.logprobs.dtype), inputs.sequence_ids)
    return {
        "num_tokens": mask.sum(),
        "num_sequences": (per_sequence > 0).sum(),
        "clipped": (term.clipped & mask).sum(),
        "dual_clipped": (term.dual_clipped & mask).sum(),
        "approx_kl": kl_estimate(inputs.old_logprobs, inputs.logprobs, "k3").sum(),
    }


def _mismatch_sums(
    clean: LossInputs, mismatch: MismatchWeights, config: GRPO
) -> dict[str, torch.Tensor]:
    # In float64: a sequence's ratio may be so large that its square is not exact.
    ratios = mismatch.ratios.double()
    vetoed = sequence_sums(mismatch.vetoed.to(clean.logprobs.dtype), clean.sequence_ids)
    return {
        "mismatch_kl": kl_estimate(clean.generator_logprobs, _proximal(clean, config), "k3").sum(),
        "capped": mismatch.capped.sum(),
        "masked": mismatch.masked.sum(),
        "vetoed_sequences": (vetoed > 0).sum(),
        "weight": ratios.sum(),
        "weight_squared": ratios.square().sum(),
    }
