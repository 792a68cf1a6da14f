# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adds up who waited for whom in a run, and names the causes with the setting that changes each.

Sums are those of the metrics ``wall/...``, ``wait/...`` and ``servers/...`` (docs/metrics.md).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.run_folder.start_record import toml_value

_WALL = re.compile(r"wall/(\w+)_seconds")
_WAIT = re.compile(r"wait/(\w+)_seconds")
_SERVER = re.compile(r"servers/(.+)/(\w+)_fraction")
_ACTIVITIES = ("generating", "prefill", "paused", "idle", "lost", "asleep", "starting")
_WORK = ("forward", "backward", "optimizer")
_LEAST = 0.01
_BUSY = 0.05


Seconds = defaultdict[str, float]


class _Cause(NamedTuple):
    """What was waited for, what to do, and the settings that change it; the first is named with its value."""

    what: str
    remedy: str
    settings: tuple[str, ...] = ()


_CAUSES = {
    "generation": _Cause("rollouts that all servers were generating", "add servers", ("inference.num_servers",)),
    "concurrency": _Cause(
        "rollouts, although servers had no requests for {idle:.0%} of the time", "raise", ("rollout.max_concurrent_rollouts",),
    ),
    "tail": _Cause(
        "the last quarter of a batch's completions, the longest ones", "let batches wait for fewer of them, with",
        ("rollout.max_head_offpolicyness", "rollout.overdue"),
    ),
    "slow_server": _Cause(
        "the server {slow}, which takes {slow_factor:.1f} times as long for a token as the others",
        "look at its log and its device, or leave it out of", ("inference.urls",),
    ),
    "stalled_server": _Cause(
        "the server {lost}, which had stopped answering", "look at its log; lower", ("rollout.request_timeout_seconds",),
    ),
    "no_server": _Cause("a server: none was ready", "look at the servers' logs, or add servers", ("inference.num_servers",)),
    "bound": _Cause(
        "rollouts that could not begin earlier, because of the staleness bound", "raise",
        ("rollout.max_head_offpolicyness",),
    ),
    "buffer": _Cause(
        "rollouts that could not begin earlier, because the buffer was full", "raise", ("rollout.buffer_size_limit",),
    ),
    "rewards": _Cause("reward functions", "make them faster, or raise", ("reward.num_workers", "reward.concurrency")),
    "judge": _Cause("the judge", "let more servers judge, or raise", ("reward.judge.max_concurrent",)),
    "teacher": _Cause("the teacher's ratings", "let more servers rate", ("teacher.urls",)),
    "episodes": _Cause(
        "environments or agents", "make them faster, or raise", ("rollout.environment_workers", "agent.workers"),
    ),
    "lend": _Cause("lent servers to sleep, so that training has its devices", ""),
    "rollouts": _Cause("messages of the rollout process", "lower", ("grpo.prompts_per_step",)),
    "plan": _Cause("plans of steps and for their rows to reach the ranks", "do without", ("prompts.single_rank_load",)),
    "fence": _Cause("the copy of the last weights", "make it smaller with", ("weight_sync.dtype",)),
    "push": _Cause("servers to take new weights", "push in the background with", ("grpo.async_weight_update",)),
    "publish": _Cause("the start of pushes", "lower", ("observe.samples_per_step", "weight_sync.attest_every")),
    "ranks": _Cause(
        "other ranks: rank {slowest} took {slowest_factor:.1f} times as long as the typical one",
        "look at its device and host, or at",
        ("prompts.balance_batch",),
    ),
    "checkpoint": _Cause("checkpoints", "write them beside training, or less often, with", ("checkpoint.async_mode", "checkpoint.interval")),
    "evaluation": _Cause(
        "evaluations", "evaluate less often, or fewer prompts, with", ("evaluation.interval", "evaluation.num_prompts"),
    ),
    "export": _Cause("exports of the model", "raise", ("grpo.hf_export_interval",)),
    "training": _Cause(
        "the trainer: servers could start nothing new", "give training more devices, or raise",
        ("rollout.max_head_offpolicyness",),
    ),
    "other": _Cause("everything else, such as metrics and plans", "lower", ("observe.samples_per_step",)),
}  # fmt: skip
_READING = _Cause("the next examples or recorded rollouts", "", ())
_STAGE = _Cause(
    _CAUSES["ranks"].what, "look at its device and host, or at the layers of its stages in",
    ("parallelism.module_fqns_per_model_part",),
)  # fmt: skip
_BUBBLES = _Cause(
    "other stages of the pipeline, although no rank is slow", "use another schedule, or larger batches, with",
    ("parallelism.pipeline_parallel_schedule", "grpo.prompts_per_step"),
)  # fmt: skip
_UNEVEN = _Cause(
    "other ranks, none of which is slow in most steps", "look at", ("prompts.balance_batch",)
)


class WhoWaits:
    """The sums of a run's steps, in seconds. The part before the first step is not a wait of the steps."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.trainer: Seconds = defaultdict(float)
        self.rollouts: Seconds = defaultdict(float)
        self._servers: defaultdict[str, Seconds] = defaultdict(lambda: defaultdict(float))
        self._held = 0.0
        self._ranks = Counter[float]()  # how often each was the slowest
        self._factors: list[float] = []
        self._latest: Mapping[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        seconds = metrics.get("wall/total_seconds", 0.0)
        for key, value in metrics.items():
            if (match := _WALL.fullmatch(key)) and match[1] != "total":
                self.trainer[match[1]] += value
            elif match := _WAIT.fullmatch(key):
                self.rollouts[match[1]] += value
            elif (match := _SERVER.fullmatch(key)) and match[2] in _ACTIVITIES:
                self._servers[match[1]][match[2]] += value * seconds
        self._held += metrics.get("rollout/wait_trainer_fraction", 0.0) * seconds
        if "ranks/slowest" in metrics:
            self._ranks[metrics["ranks/slowest"]] += 1
            self._factors.append(metrics.get("ranks/slowest_factor", 1.0))
        if "policy_version" in metrics:
            self._latest = metrics

    def summary(self) -> dict[str, Any]:
        """Returns the seconds of each cause, and for each server the share of each activity."""
        return {
            "seconds": round(sum(self.trainer.values()), 3),
            "trainer": _sorted(self.trainer, 3),
            "rollouts": _sorted(self.rollouts, 3),
            "servers": {url: self._shares(url) for url in self._servers},
        }

    def causes(self) -> list[dict[str, Any]]:
        """Returns what the steps waited for, the longest first, each with what changes it."""
        steps = sum(self.trainer.values()) - self.trainer.get("start", 0.0)
        if steps <= 0:
            return []
        waits = {k: v for k, v in self.trainer.items() if k not in (*_WORK, "start", "rollouts")}
        waits |= self.rollouts
        # Messages and plans take the time that the rollout process does not know.
        waits["rollouts"] = max(
            self.trainer.get("rollouts", 0.0) - sum(self.rollouts.values()), 0.0
        )
        if self._held and sum(waits.values()) < _BUSY * steps:
            waits["training"] = self._held
        found = sorted(waits.items(), key=lambda item: -item[1])
        return [self._cause(k, v, v / steps) for k, v in found if v >= _LEAST * steps]

    def _cause(self, cause: str, seconds: float, fraction: float) -> dict[str, Any]:
        row = self._row(cause)
        what = row.what.format(**self._figures())
        text = f"{fraction:.0%} of the time of the steps waited for {what}"
        setting = row.settings[0] if row.settings else None
        if setting is not None:
            text += f"; {row.remedy} {self._named(setting)}"
        for other in row.settings[1:]:
            text += f" or {self._named(other)}"
        return {
            "cause": cause,
            "fraction": round(fraction, 4),
            "seconds": round(seconds, 3),
            "text": f"{text}.",
            "setting": setting,
        }

    def _row(self, cause: str) -> _Cause:
        if cause == "rollouts" and not self._config.has_servers:
            return _READING
        if cause == "ranks":
            is_slow = self._median_factor() >= 1.1
            if self._config.parallelism.pipeline_parallel_degree > 1:
                return _STAGE if is_slow else _BUBBLES
            return _CAUSES["ranks"] if is_slow else _UNEVEN
        return _CAUSES.get(cause, _CAUSES["other"])

    def _named(self, setting: str) -> str:
        value: Any = self._config
        for name in setting.split("."):
            value = getattr(value, name)
        if isinstance(value, list) or value is None:
            return setting
        return f"{setting} (now {toml_value(value)})"

    def _figures(self) -> dict[str, Any]:
        shares = {url: self._shares(url) for url in self._servers}
        seconds = {url: self._latest.get(f"servers/{url}/token_seconds", 0.0) for url in shares}
        slow = max(seconds, key=seconds.__getitem__, default="?")
        rest = sorted(v for url, v in seconds.items() if url != slow and v > 0)
        lost = {url: of.get("lost", 0.0) for url, of in shares.items()}
        return {
            "idle": sum(of.get("idle", 0.0) for of in shares.values()) / max(len(shares), 1),
            "slow": slow,
            "slow_factor": seconds[slow] / rest[len(rest) // 2] if rest else 1.0,
            "lost": max(lost, key=lost.__getitem__, default="?"),
            "slowest": f"{self._ranks.most_common(1)[0][0]:.0f}" if self._ranks else "?",
            "slowest_factor": self._median_factor(),
        }

    def _median_factor(self) -> float:
        return sorted(self._factors)[len(self._factors) // 2] if self._factors else 1.0

    def _shares(self, url: str) -> dict[str, float]:
        total = sum(self._servers[url].values()) or 1.0
        return _sorted({cause: part / total for cause, part in self._servers[url].items()}, 4)


def _sorted(parts: Mapping[str, float], digits: int) -> dict[str, float]:
    """Returns rounded values, the largest first."""
    return {k: round(v, digits) for k, v in sorted(parts.items(), key=lambda item: -item[1])}
