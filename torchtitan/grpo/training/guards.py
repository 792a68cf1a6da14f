# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides, before each optimizer step, whether it is taken; see ``[guards]``.

Every rank judges the same numbers by the same rules, so it need not ask the others: loss metrics
are summed over all ranks first, and the gradient norm is rank 0's. A skipped step advances the
policy version and publishes its unchanged weights, because the staleness bound would otherwise
admit no further prompts.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from torchtitan.grpo.errors import STOPPED_BY_GUARD, RunError
from torchtitan.grpo.job_config import JobConfig

_TERMS = ("loss/policy", "loss/ptx")


@dataclass(frozen=True)
class Reading:
    """Numbers of one optimizer step before it is taken, the same on every rank.

    Attributes:
        grad_norm: Norm of the whole gradient before clipping.
        entropy: Mean in nats per trained token; ``None`` if it is not computed.
        mismatch_kl: Divergence between trainer and servers, in nats per trained token.
        reference_kl: Divergence from the reference, in nats per trained token; 0 without one.
        others: Other loss metrics, without those of a user's policy loss, which may mean to be
            infinite.
    """

    grad_norm: float
    loss: float
    entropy: float | None
    mismatch_kl: float
    reference_kl: float
    others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, grad_norm: float, metrics: Mapping[str, float]) -> "Reading":
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
    def __init__(self, config: JobConfig) -> None:
        self._guards = config.guards
        self._max_norm = config.training.max_norm
        self._norms: deque[float] = deque(maxlen=config.guards.grad_norm_window)

    def findings(self, reading: Reading) -> Iterator[tuple[str, str]]:
        """Yields guards with what they found."""
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
    broken = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    return " and ".join(broken) or None


GUARDS = (
    "nonfinite", "grad_norm", "entropy", "equal_rewards", "mismatch_kl", "reference_kl",
    "servers_lost",
)  # fmt: skip


class GuardStopped(RunError):
    """A guard has stopped the run, for the reason in the message."""

    exit_status = STOPPED_BY_GUARD


class Verdict(IntEnum):
    """Fate of an optimizer step; the greater one counts."""

    TAKE = 0
    SKIP = 1
    STOP = 2


_VERDICTS = {"warn": Verdict.TAKE, "skip": Verdict.SKIP, "stop": Verdict.STOP}


class Guards:
    """Judges batches and optimizer steps, and counts findings.

    ``say`` is called with one line for each, on rank 0. ``reason`` tells why the run is to end, if
    so.
    """

    def __init__(self, config: JobConfig, say: Callable[[str], None]) -> None:
        self._guards, self._say = config.guards, say
        self._rules = GuardRules(config)
        # A replay that names no reward may have been taught only by a teacher.
        has_rewards = config.has_rewards and (config.reward.functions or config.has_servers)
        self._equal_limit = config.observe.equal_rewards_steps if has_rewards else 0
        self._counts: Counter[str] = Counter(dict.fromkeys((*GUARDS, "skipped"), 0))
        self._in_a_row: Counter[str] = Counter()
        self._num_equal = 0  # batches in a row without two different rewards in a group
        self._of_rewards = Verdict.TAKE
        self._is_lost = False
        self.reason: str | None = None

    def judge_rewards(self, step: int, *, are_equal: bool) -> Verdict:
        """Judges a batch before training; SKIP skips all its optimizer steps.

        ``are_equal`` means that no group has two different rewards.
        """
        action = self._guards.equal_rewards
        self._num_equal = self._num_equal + 1 if are_equal else 0
        self._of_rewards = Verdict.TAKE
        if action == "off" or not self._equal_limit or self._num_equal < self._equal_limit:
            return Verdict.TAKE
        found = (
            f"no group of the last {self._num_equal} batches had two different rewards "
            f"(observe.equal_rewards_steps = {self._equal_limit})"
        )
        # A warning is `observe/equal_rewards.py`'s, which knows the likely causes.
        self._of_rewards = self._find("equal_rewards", step, found, is_told=action == "warn")
        return self._of_rewards

    def judge(self, step: int, reading: Reading) -> Verdict:
        """Judges an optimizer step by numbers that are the same on every rank."""
        found = dict(self._rules.findings(reading))
        for guard in list(self._in_a_row):
            if guard not in found and guard not in ("equal_rewards", "skipped"):
                del self._in_a_row[guard]
        verdicts = [self._find(guard, step, text) for guard, text in found.items()]
        verdict = max([self._of_rewards, *verdicts])
        if verdict is not Verdict.SKIP:
            self._in_a_row["skipped"] = 0
            return verdict
        self._counts["skipped"] += 1
        self._in_a_row["skipped"] += 1
        if self._in_a_row["skipped"] < self._guards.max_skipped_steps:
            return verdict
        return self._stop(
            f"Guard at step {step}: {self._in_a_row['skipped']} optimizer steps in a row were skipped, "
            "as many as guards.max_skipped_steps allows, so the run ends. The lines above say why."
        )

    def judge_servers(self, step: int, lost_seconds: float) -> bool:
        """Returns whether the run must end because no server took work for ``lost_seconds``."""
        was_lost = self._is_lost
        self._is_lost = lost_seconds >= self._guards.servers_lost_seconds
        if self._is_lost and not was_lost and self._guards.servers_lost != "off":
            found = (
                f"no server has taken work for {lost_seconds:.0f} s "
                f"(guards.servers_lost_seconds = {self._guards.servers_lost_seconds:g})"
            )
            self._find("servers_lost", step, found)
        return self.reason is not None

    def halt(self) -> None:
        """Ends the run on other ranks after a guard of rank 0 has stopped it."""
        self.reason = self.reason or "A guard of rank 0 has stopped the run."

    def metrics(self) -> dict[str, float]:
        return {f"guards/{name}": float(count) for name, count in self._counts.items()}

    def raise_if_stopped(self) -> None:
        if self.reason is not None:
            raise GuardStopped(self.reason)

    def _find(self, guard: str, step: int, found: str, *, is_told: bool = False) -> Verdict:
        action = getattr(self._guards, guard)
        self._counts[guard] += 1
        self._in_a_row[guard] += 1
        line = (
            f"Guard at step {step}: {found}. With guards.{guard} = {action!r} {_OUTCOMES[action]}"
        )
        if action == "stop":
            return self._stop(line)
        number = self._in_a_row[guard]
        is_due = action == "skip" or number & (number - 1) == 0  # 1, 2, 4, 8, ... in a row
        if is_due and not is_told:
            self._say(line)
        return _VERDICTS[action]

    def _stop(self, reason: str) -> Verdict:
        self.reason = self.reason or reason
        return Verdict.STOP


_OUTCOMES = {
    "skip": "the optimizer step is not taken; the policy version advances with the same weights.",
    "stop": "the run ends here, with the weights of before.",
    "warn": "the run goes on.",
}
