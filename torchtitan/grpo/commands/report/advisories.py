# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run's numbers advise to change, with the figures that say so."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.commands.report.reading import Metrics
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.observe.who_waits import WhoWaits
from torchtitan.grpo.system.strict_json import finite

_LAST_STEPS = 1000
_WORSE = (
    "worse policy",
    "score",
    "optimizer.lr, grpo.group_size, grpo.prompts_per_step, reward.functions",
)
_OF_WAITS = re.compile("(wall|wait|servers|ranks)/|policy_version|rollout/wait_trainer_fraction")


@dataclass(frozen=True)
class Told:
    """What advisories are drawn from. Means of what is not known are NaN, which no comparison holds for."""

    metrics: Metrics
    evaluations: Metrics
    summary: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # of the settings, by table and key
    config_file: Path | None = None  # of the last start

    def setting(self, table: str, key: str) -> Any:
        held = self.values.get(table)
        return held.get(key) if isinstance(held, dict) else None

    def early(self, key: str) -> float:
        values = self.metrics.known(key)
        return float(values[: max(1, len(values) // 5)].mean()) if len(values) else math.nan

    def late(self, key: str) -> float:
        """The mean over the last fifth of the steps."""
        values = self.metrics.known(key)
        return float(values[-max(1, len(values) // 5) :].mean()) if len(values) else math.nan

    def most(self, key: str) -> float:
        return float(self.metrics.known(key).max(initial=0.0))

    def total(self, key: str) -> float:
        return float(self.metrics.known(key).sum())

    def late_of(self, pattern: str) -> dict[str, float]:
        return {name: self.late(key) for name, key in self.metrics.matching(pattern).items()}


def advisories(told: Told) -> list[dict[str, str]]:
    """Returns what to change: a policy that got worse, causes of waiting by their time, the table's other rows."""
    listed = told.summary.get("causes")
    causes = listed if isinstance(listed, list) else _causes_so_far(told)

    def chart(cause: Mapping[str, Any]) -> str:
        is_of_rollouts = f"wait/{cause.get('cause')}_seconds" in told.metrics.columns
        return "waits" if is_of_rollouts else "trainer"

    worse = [(*_WORSE, text)] if (text := _worse(told)) else []
    waits = [
        (f"waits for {c.get('cause')}", chart(c), str(c.get("setting") or ""), str(c.get("text")))
        for c in causes
        if isinstance(c, dict) and (finite(c.get("fraction")) or 0.0) >= 0.05
    ]
    rest = [(*row[:3], text) for row in _TABLE if (text := row[3](told))]
    found = [*worse, *waits, *rest]  # to learn matters more than to be fast
    return [dict(zip(("id", "chart", "change", "text"), one, strict=True)) for one in found]


def _causes_so_far(told: Told) -> list[dict[str, Any]]:
    """The causes in the last steps of a run that has no summary."""
    if told.config_file is None:
        return []
    try:
        waits = WhoWaits(read_config(["--job.config_file", str(told.config_file)]))
    except ConfigError:  # of an earlier release
        return []
    columns = {k: c for k, c in told.metrics.columns.items() if _OF_WAITS.match(k)}
    number = len(told.metrics.steps)
    for i in range(max(0, number - _LAST_STEPS), number):
        waits.add({key: column[i] for key, column in columns.items() if math.isfinite(column[i])})
    return waits.causes()


def _stale(told: Told) -> str:
    bound = finite(told.setting("rollout", "max_head_offpolicyness"))
    age, most = told.late("staleness/mean_steps"), told.most("staleness/max_steps")
    is_stale = age >= 2 or (bound is not None and most > bound)
    return f"Samples are {age:.1f} batches old on average, at most {most:g}." if is_stale else ""


def _behind(told: Told) -> str:
    lags = told.late_of(r"weight_sync/(server\d+)/lag")
    versions, newest = told.late_of(r"servers/(.+)/version"), told.late("policy_version")
    lags |= {name: newest - version for name, version in versions.items()}
    return _each("{} is {:.1f} versions behind", {k: v for k, v in lags.items() if v > 2})


def _slow(told: Told) -> str:
    speeds = {n: s for n, s in told.late_of(r"servers/(.+)/token_seconds").items() if s > 0}
    usual = float(np.median(sorted(speeds.values())[: (len(speeds) + 1) // 2])) if speeds else 0.0
    slow = {name: s / usual for name, s in speeds.items() if s > 1.5 * usual}
    return _each("{} takes {:.1f} times as long for a token as others", slow)


def _each(form: str, values: Mapping[str, float]) -> str:
    return "; ".join(form.format(*one) for one in values.items()) + ("." if values else "")


def _no_gradient(told: Told) -> str:
    norms, tokens = told.metrics.column("grad_norm"), told.metrics.column("data/trained_tokens")
    steps = np.array(told.metrics.steps)[(norms == 0) | np.isinf(norms) | (tokens == 0)]
    skipped = told.most("guards/skipped")
    first = f", the first is step {steps[0]}" if len(steps) else ""
    text = f"Steps without a gradient: {len(steps)}{first}. Guards skipped {skipped:g}."
    return text if first or skipped else ""


def _collapsed(told: Told) -> str:
    length = "rollout/completion_tokens_mean"
    before, after = told.early("reward/mean"), told.late("reward/mean")
    long, short = told.early(length), told.late(length)
    if not (after > before and short < 0.5 * long):
        return ""
    return (
        f"The reward rose from {before:.3g} to {after:.3g} while completions shrank from {long:.0f} "
        f"to {short:.0f} tokens. The policy may exploit the reward: read its last completions."
    )


def _worse(told: Told) -> str:
    scores, reward = told.evaluations.known("evaluation/score"), "reward/mean"
    before, after = told.early(reward), told.late(reward)
    if not len(scores):
        fell, noise = before - after, 0.2 * told.late("reward/std")
        is_worse = fell > 0.1 * abs(before) and not fell < noise
        return f"The reward fell from {before:.3g} to {after:.3g}." if is_worse else ""
    best, last = scores.max(), scores[-1]
    if best - last <= max(0.2 * abs(best), 0.02):
        return ""
    rose = " while the reward rose: it may not measure the task" if after > before else ""
    return f"The score of evaluations fell from {best:.3g} to {last:.3g}{rose}."


def _unscored(told: Told) -> str:
    part = told.late("rollout/unscored_fraction")
    counts = told.metrics.matching(r"rollout/unscored_by_(policy|service|function)")
    causes = _each("{1:.0f} by the {0}", {n: told.total(key) for n, key in counts.items()})
    return (
        f"{part:.1%} of the last completions have no reward. In all: {causes}"
        if part > 0.02
        else ""
    )


_TABLE: tuple[tuple[str, str, str, Callable[[Told], str]], ...] = (
    ("equal rewards", "equal", "rollout.dynamic_sampling, grpo.group_size, prompts",
     lambda told: f"In {part:.0%} of the last groups all rewards are equal: nothing is learned from them."
     if (part := told.late("reward/equal_groups_fraction")) > 0.5 else ""),
    ("stale samples", "staleness", "rollout.max_head_offpolicyness", _stale),
    ("cut completions", "cut", "rollout.max_new_tokens with training.seq_len",
     lambda told: f"{part:.0%} of the last completions were cut at the longest length."
     if (part := told.late("rollout/length_fraction")) > 0.1 else ""),
    ("server behind", "lanes", "weight_sync.bucket_bytes, the server's network", _behind),
    ("slow server", "lanes", "the server's devices, and what else runs on them", _slow),
    ("KV cache full", "lanes", "rollout.max_concurrent_rollouts, memory of servers",
     lambda told: _each("{} has {:.0%} of its KV cache in use", {
         name: part for name, part in told.late_of(r"servers/(.+)/kv_use").items() if part >= 0.95})),
    ("no gradient", "gradient", "optimizer.lr, reward.functions, guards", _no_gradient),
    ("length collapse", "length", "reward.functions, reward.weights", _collapsed),
    ("unscored", "dropped", "reward.unscorable_value, reward.functions, the judge", _unscored),
    ("mismatch", "mismatch", "dtype and sampling of servers, grpo.mismatch_correction",
     lambda told: f"Trainer and servers differ by {kl:.3g} nats a token; below 0.03 is healthy."
     if (kl := told.late("mismatch/kl")) > 0.03 else ""),
    ("entropy collapse", "entropy", "grpo.entropy_coef, grpo.clip_high, optimizer.lr",
     lambda told: f"Entropy fell from {before:.3g} to {after:.3g} nats a token: exploration has ended."
     if (after := told.late("policy/entropy")) < min(0.05, 0.2 * (before := told.early("policy/entropy")))
     else ""),
    ("failed pushes", "pushes", "servers' logs, weight_sync",
     lambda told: f"Servers were lost to pushes {failed:g} times, and at most {lost:g} at a time."
     if (failed := told.most("weight_sync/failures")) + (lost := told.most("weight_sync/lost_servers"))
     else ""),
)  # fmt: skip
