# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The line that the console shows for a step.

There are two forms with the same fields. The short form fits into 80 columns whatever the
numbers are, because each number has a greatest width:

    rew 0.512 ent 0.51 len 11.2 age 0.75 gen/trn 12k/9.9k trn waits 45%

``gen/trn`` are generated and trained tokens per second. ``trn waits`` is the share of the step
in which the trainer waits for rollouts; ``gen waits`` is the share of time in which rollouts
wait for the trainer. The larger of the two is shown.
"""

import math
from collections.abc import Mapping

from torchtitan.grpo.rollout.drops import DROP_KINDS

WIDE_COLUMNS = 150
"""Number of columns from which on a terminal shows the long form."""

_DROPPED = (
    *((kind.metric, kind.words) for kind in DROP_KINDS.values()),
    ("rollout/cut_rollouts", "answers cut"),
)
"""Counts of a step that are shown if they are not zero."""


def short_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns the fields of a step in at most 79 characters."""
    where = f"{step}/{num_steps}"
    parts = [where if len(where) <= 9 else str(step)]
    if "reward/mean" not in metrics:
        return " ".join([*parts, *_supervised(metrics, 5)])
    if "teacher/reverse_kl" in metrics and metrics["reward/std"] == 0:
        parts.append(f"kl {number(metrics['teacher/reverse_kl'], 6)}")
    else:
        parts.append(f"rew {number(metrics['reward/mean'], 6)}")
    if "policy/entropy" in metrics:
        parts.append(f"ent {number(metrics['policy/entropy'], 4)}")
    parts.append(f"len {number(metrics['rollout/completion_tokens_mean'], 4)}")
    parts.append(f"age {number(metrics['staleness/mean_steps'], 4)}")
    trained = number(metrics["time/trained_tokens_per_second"], 4)
    generated = metrics.get("rollout/tokens_per_second")
    if generated is None:  # a replayed run has no servers
        parts.append(f"trn {trained}/s")
    else:
        who, share = who_waits(metrics)
        short = {"trainer": "trn", "rollouts": "gen"}[who]
        percent = min(round(100 * share), 99)
        parts.append(f"gen/trn {number(generated, 4)}/{trained} {short} waits {percent}%")
    return " ".join(parts)


def long_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns the fields of a step with whole words, for wide terminals and for files."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    if "reward/mean" not in metrics:
        return "  ".join([*parts, *_supervised(metrics, 7)])
    parts.append(f"reward {number(metrics['reward/mean'], 6)}")
    if "teacher/reverse_kl" in metrics:
        parts.append(f"teacher kl {number(metrics['teacher/reverse_kl'], 6)}")
    if "policy/entropy" in metrics:
        parts.append(f"entropy {number(metrics['policy/entropy'], 5)}")
    parts.append(f"length {number(metrics['rollout/completion_tokens_mean'], 5)}")
    mean, largest = metrics["staleness/mean_steps"], metrics["staleness/max_steps"]
    parts.append(f"staleness {number(mean, 4)} (max {largest:.0f})")
    generated = metrics.get("rollout/tokens_per_second")
    if generated is not None:
        parts.append(f"generated {number(generated, 5)} tok/s")
    parts.append(f"trained {number(metrics['time/trained_tokens_per_second'], 5)} tok/s")
    if generated is not None:
        who, share = who_waits(metrics)
        parts.append(f"{who} wait{'s' if who == 'trainer' else ''} {100 * share:.0f}%")
    return "  ".join(parts)


def _supervised(metrics: Mapping[str, float], width: int) -> list[str]:
    """Returns the fields of a step without rollouts."""
    speed = number(metrics["time/trained_tokens_per_second"], width)
    return [
        f"loss {number(metrics['loss/total'], width)}",
        f"epoch {number(metrics['sft/epoch'], width)}",
        f"trained {speed} tok/s",
    ]


def dropped(metrics: Mapping[str, float]) -> str:
    """Returns what was left out since the last step, or an empty string if nothing was."""
    counts = [(metrics.get(key, 0.0), words) for key, words in _DROPPED]
    found = [f"{count:.0f} {words}" for count, words in counts if count]
    return f"dropped: {', '.join(found)}" if found else ""


def who_waits(metrics: Mapping[str, float]) -> tuple[str, float]:
    """Returns who waits more, ``trainer`` or ``rollouts``, and the share of time, in [0, 1]."""
    trainer = metrics.get("time/wait_data_fraction", 0.0)
    rollouts = metrics.get("rollout/wait_trainer_fraction", 0.0)
    return ("rollouts", rollouts) if rollouts > trainer else ("trainer", trainer)


def number(value: float, width: int) -> str:
    """Returns a number in at most ``width`` characters, with as many digits as fit.

    Example: with a width of 4, 0.5123 is ``0.51``, 1234 is ``1234``, 12345 is ``12k``.

    Args:
        value: The number. A negative one needs a width of at least 5.
        width: Number of characters, at least 4.
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
