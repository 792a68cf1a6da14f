# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides, before each optimizer step, whether it is taken; see ``[guards]``.

All ranks judge the same numbers and need not ask each other: loss metrics are sums over ranks, and
the gradient norm is rank 0's. A skipped step advances the policy version and publishes its
unchanged weights, because the staleness bound would otherwise admit no further prompts.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import IntEnum

from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.errors import STOPPED_BY_GUARD, RunError
from torchtitan.grpo.types import CAUSES

# A norm of so many medians is a spike, of which the step's line names the parameter.
_SPIKE_FACTOR = 10.0
# So many optimizer steps skipped in a row end the run.
_MAX_SKIPPED_STEPS = 10
# Time without a server that takes work, after which they count as lost.
_LOST_SECONDS = 60.0
# Metrics of a user's policy loss begin with "loss/" as well, and may mean to be infinite.
_TERMS = ("loss/reference_kl", "loss/policy", "loss/ptx")
GUARDS = (
    "nonfinite", "grad_norm", "entropy", "equal_rewards", "mismatch_kl", "servers_lost", "unscored",
)  # fmt: skip


class GuardStopped(RunError):
    exit_status = STOPPED_BY_GUARD


class Verdict(IntEnum):
    """What becomes of an optimizer step; of several verdicts, the greatest counts."""

    TAKE = 0
    SKIP = 1
    STOP = 2


_VERDICTS = {"warn": Verdict.TAKE, "skip": Verdict.SKIP, "stop": Verdict.STOP}


class Guards:
    """Judges batches and optimizer steps, and counts findings.

    ``say`` is called with a line for each finding, on rank 0. ``reason`` says why the run must end.
    """

    def __init__(self, config: JobConfig, say: Callable[[str], None]) -> None:
        self._guards, self._say = config.guards, say
        self._max_norm = config.training.max_norm
        self._norms: deque[float] = deque(maxlen=config.guards.grad_norm_window)
        self._critic_norms: deque[float] = deque(maxlen=config.guards.grad_norm_window)
        # A replay that names no reward may have been taught only by a teacher.
        has_rewards = config.has_rewards and (reward_functions(config) or config.has_servers)
        self._equal_limit = config.observe.equal_rewards_steps if has_rewards else 0
        self._counts: Counter[str] = Counter(dict.fromkeys((*GUARDS, "skipped"), 0))
        self._in_a_row: Counter[str] = Counter()
        self._num_equal = 0  # batches in a row without two different rewards in a group
        self._of_rewards = Verdict.TAKE
        self._is_lost = False
        self.reason: str | None = None

    def judge_rewards(self, step: int, *, are_equal: bool) -> Verdict:
        """Judges a batch by its rewards. SKIP means to skip all optimizer steps of the batch.

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

    def is_spike(self, norm: float) -> bool:
        """Returns whether a norm not yet judged is far above those of the last steps."""
        return math.isfinite(norm) and self._is_outlier(norm, self._norms, _SPIKE_FACTOR)

    def judge(
        self, step: int, grad_norm: float | None, metrics: Mapping[str, float], spike: str = ""
    ) -> Verdict:
        """Judges an optimizer step by its loss metrics and its gradient norm before clipping.

        ``grad_norm`` is None if only a critic learns. ``metrics`` include a critic's metrics and norm,
        if there is a critic. ``spike`` names the largest gradient if the norm is a spike.
        """
        found = self._findings(grad_norm, metrics, spike)
        for guard in list(self._in_a_row):
            if guard not in found and guard not in ("equal_rewards", "skipped", "unscored"):
                del self._in_a_row[guard]
        verdicts = [self._find(guard, step, text) for guard, text in found.items()]
        verdict = max([self._of_rewards, *verdicts])
        if verdict is not Verdict.SKIP:
            self._in_a_row["skipped"] = 0
            return verdict
        self._counts["skipped"] += 1
        self._in_a_row["skipped"] += 1
        if self._in_a_row["skipped"] < _MAX_SKIPPED_STEPS:
            return verdict
        return self._stop(
            f"Guard at step {step}: {self._in_a_row['skipped']} optimizer steps in a row were skipped, "
            "so the run ends: it learns nothing any more. The lines above say why."
        )

    def _findings(
        self, grad_norm: float | None, metrics: Mapping[str, float], spike: str
    ) -> dict[str, str]:
        found = {"nonfinite": _not_finite(grad_norm or 0.0, metrics)}
        # Other numbers of a broken step mean nothing, and do not enter the median.
        if found["nonfinite"] is None:
            found = {
                "grad_norm": self._grad_norms(grad_norm, metrics.get("critic/grad_norm"), spike),
                "entropy": self._entropy(metrics["policy/entropy"]),
                "mismatch_kl": self._above("mismatch/kl", metrics, "mismatch_kl"),
            }
        return {
            guard: text
            for guard, text in found.items()
            if text is not None and getattr(self._guards, guard) != "off"
        }

    def _grad_norms(self, norm: float | None, of_critic: float | None, spike: str) -> str | None:
        found: list[str | None] = []
        if norm is not None:
            text = self._spike("grad_norm", norm, self._norms)
            found.append(f"{text} ({spike})" if text and spike else text)
        if of_critic is not None:
            found.append(self._spike("critic/grad_norm", of_critic, self._critic_norms))
        return " and ".join(text for text in found if text) or None

    def _spike(self, name: str, norm: float, norms: deque[float]) -> str | None:
        factor, found = self._guards.grad_norm_factor, None
        if factor and self._is_outlier(norm, norms, factor):
            found = (
                f"{name} is {norm:.4g}, above guards.grad_norm_factor = {factor:g} times the median "
                f"of the last {len(norms)} optimizer steps, {statistics.median(norms):.4g}"
            )
        # Outliers enter as well: the median follows a norm that has risen for good.
        norms.append(norm)
        return found

    def _is_outlier(self, norm: float, norms: deque[float], factor: float) -> bool:
        is_full = len(norms) == norms.maxlen
        return is_full and norm > self._max_norm and norm > factor * statistics.median(norms)

    def _entropy(self, entropy: float) -> str | None:
        floor = self._guards.entropy_floor
        # 0 is one that is not computed: that of a real distribution is above it.
        if entropy == 0 or entropy >= floor:
            return None
        return f"policy/entropy is {entropy:.4g}, below guards.entropy_floor = {floor:g}"

    def _above(self, name: str, metrics: Mapping[str, float], guard: str) -> str | None:
        value, limit = metrics[name], getattr(self._guards, f"{guard}_limit")
        if value <= limit:
            return None
        return f"{name} is {value:.4g}, above guards.{guard}_limit = {limit:g}"

    def judge_unscored(self, step: int, metrics: Mapping[str, float]) -> None:
        """Judges, on rank 0, the share of completions since the last batch that were left out unscored."""
        if self._guards.unscored == "off" or "rollout/unscored_fraction" not in metrics:
            return
        if (found := self._above("rollout/unscored_fraction", metrics, "unscored")) is not None:
            counts = [f"{metrics[metric]:.0f} by {cause}" for cause, metric in CAUSES.items()]
            self._find("unscored", step, f"{found} (completions unscored {', '.join(counts)})")

    def judge_servers(self, step: int, lost_seconds: float) -> bool:
        """Returns whether the run must end because no server took work for ``lost_seconds``."""
        was_lost = self._is_lost
        self._is_lost = lost_seconds >= _LOST_SECONDS
        if self._is_lost and not was_lost and self._guards.servers_lost != "off":
            found = f"no server has taken work for {lost_seconds:.0f} s"
            self._find("servers_lost", step, found)
        return self.reason is not None

    def halt(self) -> None:
        """Stops the run on this rank, after a guard of rank 0 has stopped it there."""
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
        is_due = action == "skip" or number & (number - 1) == 0  # 1, 2, 4, 8, ...
        if is_due and not is_told:
            self._say(line)
        return _VERDICTS[action]

    def _stop(self, reason: str) -> Verdict:
        self.reason = self.reason or reason
        return Verdict.STOP


def _not_finite(grad_norm: float, metrics: Mapping[str, float]) -> str | None:
    others = {k: v for k, v in metrics.items() if k in _TERMS or not k.startswith("loss/")}
    # What a broken loss does to other metrics says nothing more.
    for numbers in ({"loss/total": metrics["loss/total"], "grad_norm": grad_norm}, others):
        broken = [
            f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)
        ]
        if broken:
            return " and ".join(broken)
    return None


_OUTCOMES = {
    "skip": "the optimizer step is not taken; the policy version advances with the same weights.",
    "stop": "the run ends here, with the weights of before.",
    "warn": "the run goes on.",
}
