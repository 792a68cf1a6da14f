# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The line that the console shows for a step, in two forms with the same fields.

The short form always fits into 80 columns, because each number has a greatest width:

    rew 0.512 ent 0.51 len 11.2 age 0.75 gen/trn 12k/9.9k trn waits 45%

``gen/trn`` are generated and trained tokens per second. ``trn waits`` is the share of the step
in which the trainer waits for rollouts; ``gen waits``, if it is larger, the share in which
rollouts wait for the trainer. Where most of the trainer's wait is for rewards, or for environments and
agents, the field begins with ``rewards`` or ``episodes``. The long form has both shares, times of
these, and the share for which the devices were lent to servers.
"""

import math
from collections.abc import Iterator, Mapping

from torchtitan.grpo.rollout.drops import DROP_KINDS

WIDE_COLUMNS = 150
"""Number of columns from which on a terminal shows the long form."""

_DROPPED = tuple((kind.metric, kind.words) for kind in DROP_KINDS.values())
"""Counts of a step that are shown if they are not zero."""
_CAUSES = (
    ("rollout/wait_rewards_fraction", "rewards"),
    ("rollout/wait_episodes_fraction", "episodes"),
)
_TIMES = {"scoring_seconds": "scoring", "judge_seconds": "judge", "own_seconds": ""}
"""Last parts of metrics, and what the line calls them if it is not what is before."""


def short_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns a line of at most 79 characters."""
    return " ".join(short for short, _ in _fields(step, num_steps, metrics) if short)


def long_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    return "  ".join(long for _, long in _fields(step, num_steps, metrics) if long)


def _fields(step: int, num_steps: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields each field in its short and its long form; an empty one is left out of its line."""

    def field(short: str, long: str, key: str, width: int, wide: int) -> tuple[str, str]:
        value = metrics[key]
        return f"{short} {number(value, width)}", f"{long} {number(value, wide)}"

    where = f"{step}/{num_steps}"
    yield where if len(where) <= 9 else str(step), f"step {step:>{len(str(num_steps))}}/{num_steps}"
    speed = metrics["time/trained_tokens_per_second"]
    if "reward/mean" not in metrics:  # supervised
        yield field("loss", "loss", "loss/total", 5, 7)
        yield field("epoch", "epoch", "sft/epoch", 5, 7)
        yield f"trained {number(speed, 5)} tok/s", f"trained {number(speed, 7)} tok/s"
        return
    reward = field("rew", "reward", "reward/mean", 6, 6)
    if "teacher/reverse_kl" in metrics:
        divergence = field("kl", "teacher kl", "teacher/reverse_kl", 6, 6)
        is_alone = metrics["reward/std"] == 0
        yield ("", reward[1]) if is_alone else reward
        yield (divergence[0] if is_alone else "", divergence[1])
    else:
        yield reward
    if "policy/entropy" in metrics:
        yield field("ent", "entropy", "policy/entropy", 4, 5)
    yield field("len", "length", "rollout/completion_tokens_mean", 4, 5)
    short, long = field("age", "staleness", "staleness/mean_steps", 4, 4)
    yield short, f"{long} (max {metrics['staleness/max_steps']:.0f})"
    generated = metrics.get("rollout/tokens_per_second")
    if generated is None:  # a replayed run has no servers
        yield f"trn {number(speed, 4)}/s", f"trained {number(speed, 5)} tok/s"
        return
    causes = [(metrics.get(key, 0.0), name) for key, name in _CAUSES]
    most, cause = max(causes)
    share = metrics.get("time/wait_data_fraction", 0.0)
    short, waits = (cause if 2 * most > share else "trn waits"), "trainer waits"
    if (of_rollouts := metrics.get("rollout/wait_trainer_fraction", 0.0)) > share:
        short, waits, share = "gen waits", "rollouts wait", of_rollouts
    yield (
        f"gen/trn {number(generated, 4)}/{number(speed, 4)}",
        f"generated {number(generated, 5)} tok/s  trained {number(speed, 5)} tok/s",
    )
    yield f"{short} {min(round(100 * share), 99)}%", f"{waits} {100 * share:.0f}%"
    for part, name in causes:
        yield "", f"for {name} {100 * part:.0f}%" if part >= 0.005 else ""
    for key, value in metrics.items():
        what, _, unit = key.rpartition("/")
        if unit in _TIMES and value >= 0.05:
            yield "", f"{_TIMES[unit] or what} {number(value, 5)} s"
    if "lend/lent_seconds" in metrics:
        lent = metrics["lend/lent_seconds"] / metrics["time/step_seconds"]
        yield "", f"devices lent {100 * lent:.0f}%"


def dropped(metrics: Mapping[str, float]) -> str:
    """What was left out since the last step; empty if nothing was."""
    counts = [(metrics.get(key, 0.0), words) for key, words in _DROPPED]
    found = [f"{count:.0f} {words}" for count, words in counts if count]
    return f"dropped: {', '.join(found)}" if found else ""


def number(value: float, width: int) -> str:
    """Writes a number in at most ``width`` characters, at least 4, or 5 for a negative one.

    With 4, 0.5123 is ``0.51``, and 12345 is ``12k``.
    """
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.5 * 10.0 ** -min(width - 2, 3):
        return _scientific(value)
    for factor, suffix in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        for decimals in (3, 2, 1, 0) if factor == 1 else (1, 0):
            text = f"{value / factor:.{decimals}f}{suffix}"
            if len(text) <= width:
                return text
    return _scientific(value)


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
