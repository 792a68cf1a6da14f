# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides, before each optimizer step, whether it is taken; see ``[guards]``.

Every rank judges the same numbers by the same rules, and so decides the same without asking the
others: the metrics of the loss are summed over all ranks first, and the gradient norm is that of
rank 0. The judgment needs no further value of the device.

A skipped step advances the policy version like any other, and its unchanged weights are published
under the new version. Otherwise the servers would stay at the old version, and the staleness bound
would admit no further prompts: a run at ``rollout.max_head_offpolicyness = 0`` would never
continue.
"""

from collections import Counter
from collections.abc import Callable
from enum import IntEnum

from torchtitan.grpo.errors import STOPPED_BY_GUARD, RunError
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.training.guard_rules import GuardRules, Reading

GUARDS = (
    "nonfinite", "grad_norm", "entropy", "equal_rewards", "mismatch_kl", "reference_kl",
    "servers_lost",
)  # fmt: skip
"""The guards, by the names of their settings."""


class GuardStopped(RunError):
    """Raised at the end of a run that a guard has stopped. The message says why."""

    exit_status = STOPPED_BY_GUARD


class Verdict(IntEnum):
    """What becomes of an optimizer step; the greater one counts."""

    TAKE = 0
    SKIP = 1
    STOP = 2


_VERDICTS = {"warn": Verdict.TAKE, "skip": Verdict.SKIP, "stop": Verdict.STOP}


class Guards:
    """Judges batches and optimizer steps, and counts what was found.

    Args:
        config: Configuration of the run.
        say: Called with the one line that says what happened. Ranks other than 0 pass a function
            that does nothing.

    Attributes:
        reason: Why the run is to end; ``None`` while it goes on.
    """

    def __init__(self, config: JobConfig, say: Callable[[str], None]) -> None:
        self._guards, self._say = config.guards, say
        self._rules = GuardRules(config)
        # A replay that names no reward may have been taught by a teacher alone.
        has_rewards = config.has_rewards and (config.reward.functions or config.has_servers)
        self._equal_limit = config.observe.equal_rewards_steps if has_rewards else 0
        self._counts: Counter[str] = Counter(dict.fromkeys((*GUARDS, "skipped"), 0))
        self._in_a_row: Counter[str] = Counter()
        self._num_equal = 0  # batches in a row without two different rewards in a group
        self._of_rewards = Verdict.TAKE
        self._is_lost = False
        self.reason: str | None = None

    def judge_rewards(self, step: int, *, are_equal: bool) -> Verdict:
        """Judges the rewards of a batch before it is trained on.

        With SKIP all optimizer steps of the batch are skipped.

        Args:
            step: The batch's step.
            are_equal: Whether no group of the batch has two different rewards.
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
        """Judges an optimizer step before it is taken.

        Args:
            step: The step, which is the number of the batch.
            reading: What is known of it, the same on every rank.
        """
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
        """Judges how long rank 0 waits without any server; returns whether the run is to end.

        Args:
            step: The step that rank 0 waits for.
            lost_seconds: How long no server has been able to take work; 0 if one is.
        """
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
        """Ends the run on a rank other than 0, because a guard of rank 0 has stopped it."""
        self.reason = self.reason or "A guard of rank 0 has stopped the run."

    def metrics(self) -> dict[str, float]:
        """Returns how often each guard has acted in this start of the run."""
        return {f"guards/{name}": float(count) for name, count in self._counts.items()}

    def raise_if_stopped(self) -> None:
        """Raises :class:`GuardStopped` if a guard has stopped the run."""
        if self.reason is not None:
            raise GuardStopped(self.reason)

    def _find(self, guard: str, step: int, found: str, *, is_told: bool = False) -> Verdict:
        """Counts and reports a finding, and returns what follows from it."""
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
