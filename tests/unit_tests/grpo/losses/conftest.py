"""The loss written out sequence by sequence, and the packing of the same sequences in rows.

The reference knows no rows, masks or weights: it loops over sequences and writes the papers'
formulas down, in float64. What it shares with the implementation is the names of metrics.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.aggregation import token_weights
from torchtitan.grpo.losses.distillation import TopLogprobs
from torchtitan.grpo.losses.loss_metrics import Metric, MetricTotals
from torchtitan.grpo.losses.objective import (
    LossInputs,
    metric_reductions,
)

MAX_NEW_TOKENS = 7


@dataclass
class Sequence:
    """A completion of n tokens after a prompt; logprobs and entropy are leaves."""

    num_prompt_tokens: int
    logprobs: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    generator: torch.Tensor
    ref: torch.Tensor
    advantage: float
    is_ptx: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    def fresh(self) -> "Sequence":
        """The same with leaves of its own, without gradients."""
        logprobs, entropy = (x.detach().clone() for x in (self.logprobs, self.entropy))
        return replace(self, logprobs=logprobs.requires_grad_(), entropy=entropy.requires_grad_())


def make_sequences(seed: int, num: int = 7, num_ptx: int = 2) -> list[Sequence]:
    """Random sequences whose ratios reach far beyond the usual bounds."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num + num_ptx):
        n = int(torch.randint(1, 6, (), generator=g))
        logprobs, entropy, *gaps = (
            torch.randn(n, generator=g, dtype=torch.float64) for _ in range(5)
        )
        logprobs = -logprobs.abs() - 0.1
        num_prompt_tokens = int(torch.randint(1, 4, (), generator=g))
        old, ref = logprobs + 0.4 * gaps[0], logprobs + 0.5 * gaps[2]
        advantage = float(torch.randn((), generator=g, dtype=torch.float64))
        generator = old + 0.6 * gaps[1]
        leaves = logprobs.requires_grad_(), entropy.abs().requires_grad_()
        made.append(
            Sequence(num_prompt_tokens, *leaves, old, generator, ref, advantage, is_ptx=i >= num)
        )
    return made


# -- the papers' formulas ------------------------------------------------------------------


def _aggregate(per_sequence: list[list[torch.Tensor]], config: GRPO) -> torch.Tensor:
    per_sequence = [losses for losses in per_sequence if losses]
    if config.aggregation == "token_mean":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if config.aggregation == "sequence_mean":
        return sum(sum(losses) / len(losses) for losses in per_sequence) / len(per_sequence)
    return sum(sum(losses) / MAX_NEW_TOKENS for losses in per_sequence) / len(per_sequence)


def _kl(policy: torch.Tensor, other: torch.Tensor, estimator: str) -> torch.Tensor:
    r = torch.exp(other - policy)
    return {
        "k1": -torch.log(r),
        "k2": torch.log(r) ** 2 / 2,
        "k3": r - 1 - torch.log(r),
    }[estimator]


def _mismatch(sequence: Sequence, config: GRPO) -> tuple[list[float], list[float], dict]:
    """Weights, the ratios that show the mismatch, and counts."""
    n = sequence.num_tokens
    on_sampling = config.old_policy == "sampling"
    proximal = sequence.logprobs.detach() if on_sampling else sequence.old
    tokens = [math.exp(proximal[t] - sequence.generator[t]) for t in range(n)]
    product = math.prod(tokens)
    ratios = {
        "token": tokens,
        "sequence": [product] * n,
        "geometric": [product ** (1 / n)] * n,
    }[config.mismatch_level]
    low, high = config.importance_floor, config.importance_cap
    mode = "none" if on_sampling else config.mismatch_correction
    outside = [r < low or r > high for r in ratios]
    counts = {"capped": 0, "masked": 0, "rejected": 0, "off_policy": 0}
    if mode == "truncate":
        ratios = [min(max(r, low), high) for r in ratios]
        counts["capped"] = sum(outside)
    if mode == "mask":
        ratios = [0.0 if out else r for r, out in zip(ratios, outside, strict=True)]
        counts["masked"] = sum(outside)
    weights = [1.0] * n if mode == "none" else ratios
    divergence, bound = sum(r - 1 - math.log(r) for r in tokens) / n, config.mismatch_max_k3
    counts["rejected"] = int(0 < bound < divergence)
    threshold = config.off_policy_mask_threshold
    lost = sum(sequence.generator - sequence.logprobs.detach()).item() / n
    counts["off_policy"] = int(threshold > 0 and sequence.advantage < 0 and lost > threshold)
    if counts["rejected"] or counts["off_policy"]:
        ratios, weights = [0.0] * n, [0.0] * n
        counts |= {"capped": 0, "masked": n}
    return weights, ratios, counts


def _policy(
    sequence: Sequence, config: GRPO, constant_weight: bool
) -> tuple[list[torch.Tensor], int]:
    """Token losses, and how many were clipped."""
    a, low, high = sequence.advantage, 1 - config.clip_low, 1 + config.clip_high
    logprobs = sequence.logprobs
    base = sequence.generator if config.old_policy == "sampling" else sequence.old
    losses, clipped = [], 0
    for t in range(sequence.num_tokens):
        if config.policy_loss == "reinforce":
            losses.append(-a * logprobs[t])
            continue
        r = torch.exp(logprobs[t] - base[t])
        if config.policy_loss == "cispo":
            weight = min(r.item(), high)
            clipped += weight != r.item()
            losses.append(-weight * a * logprobs[t])
            continue
        if config.policy_loss == "gspo":
            r = torch.exp((logprobs - base).sum() / sequence.num_tokens)
            if not constant_weight:  # GSPO-token, equation 14 of the paper
                r = r.detach() * torch.exp(logprobs[t]) / torch.exp(logprobs[t]).detach()
        gain = r * a
        if (r > high and a > 0) or (r < low and a < 0):
            gain, clipped = (high if a > 0 else low) * a + 0 * r, clipped + 1
        losses.append(-gain)
    return losses, clipped


def reference(sequences: list[Sequence], config: GRPO) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss, and metrics."""
    rollouts = [s for s in sequences if not s.is_ptx]
    ptx = [s for s in sequences if s.is_ptx]
    policy, kl, entropy, ratios = [], [], [], []
    counts: Counter[str] = Counter()
    mismatch_kl = approx_kl = nll = reference_kl = 0.0
    for s in rollouts:
        weights, observed, mismatch_counts = _mismatch(s, config)
        losses, clipped = _policy(s, config, len(set(weights)) == 1)
        policy.append([w * loss for w, loss in zip(weights, losses, strict=True)])
        penalty = _kl(s.logprobs, s.ref, config.kl_estimator)
        reference_kl += penalty.sum().item()
        kl.append(list(penalty))
        entropy.append(list(s.entropy))
        ratios += observed
        for name, count in (mismatch_counts | {"clipped": clipped}).items():
            counts[name] += count
        on_sampling = config.old_policy == "sampling"
        new = s.logprobs.detach()
        proximal, base = (new, s.generator) if on_sampling else (s.old, s.old)
        mismatch_kl += _kl(s.generator, proximal, "k3").sum().item()
        approx_kl += _kl(base, new, "k3").sum().item()
        nll -= new.sum().item()
    n = sum(s.num_tokens for s in rollouts)
    policy_loss = _aggregate(policy, config)
    num_ptx = sum(s.num_tokens for s in ptx)
    ptx_loss = torch.zeros(())
    if ptx:
        ptx_loss = config.ptx_coef * -sum(s.logprobs.sum() for s in ptx) / num_ptx
    loss = policy_loss + ptx_loss - config.entropy_coef * _aggregate(entropy, config)
    if config.kl_in == "loss":
        loss = loss + config.kl_coef * _aggregate(kl, config)
    return loss, {
        "loss/total": loss.item(),
        "loss/policy": policy_loss.item(),
        "loss/ptx": ptx_loss.item(),
        "loss/reference_kl": reference_kl / n,
        "loss/clipped_fraction": counts["clipped"] / n,
        "mismatch/kl": mismatch_kl / n,
        "mismatch/effective_sample_size": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "mismatch/capped_fraction": counts["capped"] / n,
        "mismatch/masked_fraction": counts["masked"] / n,
        "mismatch/rejected_fraction": counts["rejected"] / len(rollouts),
        "mismatch/off_policy_fraction": counts["off_policy"] / len(rollouts),
        "policy/nll": nll / n,
        "policy/approx_kl": approx_kl / n,
        "policy/entropy": sum(x.item() for e in entropy for x in e) / n,
    }


# -- the same sequences in rows --------------------------------------------------------------


# The columns of rows, and what they are called as inputs of the loss.
FIELDS = {
    "logprobs": "logprobs", "entropy": "entropy", "old": "old_logprobs",
    "generator": "generator_logprobs", "ref": "ref_logprobs", "advantage": "advantages",
    "mask": "loss_mask", "weight": "loss_weights", "ptx": "ptx_weights", "ids": "sequence_ids",
}  # fmt: skip


def pack(
    sequences: list[Sequence],
    rows: list[list[int]],
    row_len: int,
    config: GRPO,
    *,
    junk: float = 0.0,
    num_observed: int = 0,
) -> LossInputs:
    """Rows of sequences by index, padded; ``junk`` stands wherever nothing is trained.

    Behind each token of a rollout stand ``num_observed`` that an environment has put in.
    """
    lengths = [0 if s.is_ptx else s.num_tokens for s in sequences]
    weights = token_weights(
        np.array(lengths),
        kind=config.aggregation,
        constant_length=MAX_NEW_TOKENS,
    )
    num_ptx = sum(s.num_tokens for s in sequences if s.is_ptx)

    def filled(value: float, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((n,), value, dtype=dtype)

    names = tuple(FIELDS)
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for members in rows:
        row: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for sequence_id, index in enumerate(members):
            s = sequences[index]
            n, trained = s.num_tokens, not s.is_ptx
            columns_of = ("entropy", "old", "generator", "ref")
            parts = {
                "logprobs": s.logprobs,
                **{x: getattr(s, x) if trained else filled(junk, n) for x in columns_of},
                "advantage": filled(s.advantage if trained else junk, n),
                "mask": filled(trained, n, torch.bool),
                "weight": filled(weights[index] if trained else junk, n),
                "ptx": filled(0.0 if trained else config.ptx_coef / num_ptx, n),
            }
            num_behind = num_observed if trained else 0
            for name, part in parts.items():
                blank = 0.0 if name in ("mask", "ptx") else junk
                behind = filled(blank, n * num_behind, part.dtype).reshape(n, num_behind)
                part = torch.cat([part[:, None], behind], dim=1).flatten()
                # The prompt's tokens but its last predict nothing; nor does the last token.
                row[name] += [
                    filled(blank, s.num_prompt_tokens - 1, part.dtype), part,
                    filled(blank, 1, part.dtype),
                ]  # fmt: skip
            length = s.num_prompt_tokens + n * (1 + num_behind)
            row["ids"].append(filled(sequence_id, length, torch.int64))
        room = row_len - sum(len(part) for part in row["ids"])
        assert room >= 0
        row["ids"].append(filled(min(len(members), row_len - 1), room, torch.int64))
        for name in names[:-1]:
            dtype = torch.bool if name == "mask" else torch.float64
            row[name].append(filled(0.0 if name in ("mask", "ptx") else junk, room, dtype))
        for name in names:
            columns[name].append(torch.cat(row[name]))
    stacked = {name: torch.stack(column) for name, column in columns.items()}
    return LossInputs(**{field: stacked[name] for name, field in FIELDS.items()})


def row_slice(inputs: LossInputs, begin: int, end: int) -> LossInputs:
    """A microbatch: rows ``[begin, end)``."""
    top = inputs.teacher_top
    tensors = {
        name: value[begin:end] for name, value in vars(inputs).items() if torch.is_tensor(value)
    }
    tensors["ref_logprobs"] = tensors.get("ref_logprobs")
    columns = {name: value[begin:end] for name, value in inputs.columns.items()}
    if top is not None:
        top = TopLogprobs(*(value[begin:end] for value in vars(top).values()))
    return LossInputs(**tensors, teacher_top=top, columns=columns)


def metrics_of(config: GRPO, *microbatches: dict[str, Metric]) -> dict[str, float]:
    """The metrics of a batch of one optimizer step, from those of its microbatches."""
    totals = MetricTotals(metric_reductions(config))
    totals.add(microbatches)
    return totals.values(1)


def gradients(sequences: list[Sequence]) -> torch.Tensor:
    """Of all leaves, one after the other; 0 for leaves that the loss does not reach."""
    leaves = [leaf for s in sequences for leaf in (s.logprobs, s.entropy)]
    return torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    tools = (make_sequences, reference, pack, row_slice, gradients, metrics_of)
    return SimpleNamespace(**{tool.__name__: tool for tool in tools})
