# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Describes every metric: unit, meaning, healthy values, and what to do otherwise.

docs/metrics.md is made from these tables. A test fails if the code or a run has a metric that
no table describes.
"""

from collections.abc import Collection, Iterable

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section
from torchtitan.grpo.observe.metric_docs.evaluating import EVALUATION
from torchtitan.grpo.observe.metric_docs.guarding import GUARDING
from torchtitan.grpo.observe.metric_docs.learning import LEARNING
from torchtitan.grpo.observe.metric_docs.rollouts import ROLLOUTS
from torchtitan.grpo.observe.metric_docs.system import SYSTEM
from torchtitan.grpo.observe.metric_docs.teaching import TEACHING

SECTIONS: tuple[Section, ...] = (*ROLLOUTS, *LEARNING, *TEACHING, *SYSTEM, EVALUATION, *GUARDING)

__all__ = ["SECTIONS", "Metric", "Section", "undescribed"]


def undescribed(
    keys: Iterable[str], rewards: Collection[str] = (), own_loss: Collection[str] = ()
) -> list[str]:
    """Returns the keys of a run that no table describes.

    Args:
        keys: Keys of the records of ``metrics.jsonl`` or ``evaluations.jsonl``.
        rewards: Names of the reward functions of the run.
        own_loss: Metrics that the run's own policy loss returns.
    """
    known = {"step", *own_loss, *(f"reward/{name}" for name in rewards)}
    metrics = [m for section in SECTIONS for m in section.metrics if m.key != "reward/{function}"]
    return [key for key in keys if key not in known and not any(m.matches(key) for m in metrics)]
