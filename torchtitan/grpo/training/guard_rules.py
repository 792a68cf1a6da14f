# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the guards look at, and the rules by which a number is too large or too small."""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchtitan.grpo.job_config import JobConfig

_TERMS = ("loss/policy", "loss/ptx")


@dataclass(frozen=True)
class Reading:
    """Numbers of one optimizer step before it is taken, the same on every rank.

    Attributes:
        grad_norm: Norm of the whole gradient before clipping.
        loss: The whole loss.
        entropy: Mean entropy in nats per trained token. ``None`` if it is not computed.
        mismatch_kl: Divergence between trainer and servers, in nats per trained token.
        reference_kl: Divergence from the reference model, in nats per trained token; 0 without a
            reference.
        others: The other metrics of the loss by name, but for those of a policy loss of the user's
            own, of which infinite ones may be meant.
    """

    grad_norm: float
    loss: float
    entropy: float | None
    mismatch_kl: float
    reference_kl: float
    others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, grad_norm: float, metrics: Mapping[str, float]) -> "Reading":
        """Takes the numbers from the metrics of the loss, combined over all ranks."""
        entropy = metrics["policy/entropy"]
        return cls(
            grad_norm,
            metrics["loss/total"],
            entropy if entropy != 0 else None,  # that of a real distribution is above 0
            metrics["mismatch/kl"],
            metrics["loss/reference_kl"],
            {k: v for k, v in metrics.items() if k in _TERMS or not k.startswith("loss/")},
        )


class GuardRules:
    """Finds what is wrong with a reading. Rules whose guard is off are left out.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: JobConfig) -> None:
        self._guards = config.guards
        self._max_norm = config.training.max_norm
        self._norms: deque[float] = deque(maxlen=config.guards.grad_norm_window)

    def findings(self, reading: Reading) -> Iterator[tuple[str, str]]:
        """Yields the guard and what it found, with numbers and setting."""
        broken = _not_finite(reading)
        if broken is not None:
            # Other numbers of a broken step mean nothing, and do not enter the median.
            if self._guards.nonfinite != "off":
                yield "nonfinite", broken
            return
        found = (
            ("grad_norm", self._grad_norm(reading.grad_norm)),
            ("entropy", self._entropy(reading.entropy)),
            ("mismatch_kl", self._above("mismatch/kl", reading.mismatch_kl, "mismatch_kl")),
            (
                "reference_kl",
                self._above("loss/reference_kl", reading.reference_kl, "reference_kl"),
            ),
        )
        for guard, text in found:
            if text is not None and getattr(self._guards, guard) != "off":
                yield guard, text

    def _grad_norm(self, norm: float) -> str | None:
        guards = self._guards
        median = statistics.median(self._norms) if self._norms else 0.0
        is_full = len(self._norms) == self._norms.maxlen
        # Outliers enter as well: the median follows a norm that has risen for good.
        self._norms.append(norm)
        if guards.grad_norm_limit and norm > guards.grad_norm_limit:
            return f"grad_norm is {norm:.4g}, above guards.grad_norm_limit = {guards.grad_norm_limit:g}"
        factor = guards.grad_norm_factor
        if factor and is_full and norm > self._max_norm and norm > factor * median:
            return (
                f"grad_norm is {norm:.4g}, above guards.grad_norm_factor = {factor:g} times the median "
                f"of the last {len(self._norms)} optimizer steps, {median:.4g}"
            )
        return None

    def _entropy(self, entropy: float | None) -> str | None:
        floor = self._guards.entropy_floor
        if entropy is None or entropy >= floor:
            return None
        return f"policy/entropy is {entropy:.4g}, below guards.entropy_floor = {floor:g}"

    def _above(self, metric: str, value: float, guard: str) -> str | None:
        limit = getattr(self._guards, f"{guard}_limit")
        if value <= limit:
            return None
        return f"{metric} is {value:.4g}, above guards.{guard}_limit = {limit:g}"


def _not_finite(reading: Reading) -> str | None:
    # What a broken loss does to other metrics says nothing more.
    return _named({"loss/total": reading.loss, "grad_norm": reading.grad_norm}) or _named(
        {
            "mismatch/kl": reading.mismatch_kl,
            "loss/reference_kl": reading.reference_kl,
            "policy/entropy": 0.0 if reading.entropy is None else reading.entropy,
            **reading.others,
        }
    )


def _named(numbers: Mapping[str, float]) -> str | None:
    """Returns which of the numbers are not finite."""
    broken = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    return " and ".join(broken) or None
