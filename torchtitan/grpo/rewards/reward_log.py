# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What reward functions receive besides the completions and their columns, most of it as in TRL."""

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torchtitan.grpo.workers.channel import unsendable_column

ARGUMENTS = ("trainer_state", "log_extra", "log_metric", "log_unscorable")


@dataclass(frozen=True)
class TrainerState:
    """``global_step`` is the policy version that the next batch trains, counted from 0."""

    global_step: int
    max_steps: int


class RewardLog:
    """Collects what the functions of one group log. Several threads may do so."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, list[Any]] = {}
        self.unscorable: set[int] = set()

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what was logged under each name."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value of a metric. A value that is not finite is left out."""
        number = float(value)
        if math.isfinite(number):
            self._metrics[str(name)].append(number)

    def log_unscorable(self, index: int) -> None:
        """Says that this completion gets ``None`` because of what the policy wrote in it."""
        self.unscorable.add(range(self._num_completions)[index])

    def log_extra(self, column: str, values: Any) -> None:
        """Sets a column of the logged samples; values that cannot be sent are shown as text."""
        found = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(found) != self._num_completions:
            raise ValueError(
                f"log_extra({column!r}, ...) must get one value for each of "
                f"{self._num_completions} completions, got {len(found)}."
            )
        if unsendable_column({"": found}) is not None:
            found = [repr(value) for value in found]
        self.extra[str(column)] = found
