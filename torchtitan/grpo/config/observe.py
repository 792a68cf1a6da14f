# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[observe]`` table: what a run prints and writes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import at_least


@dataclass
class Observe:
    """``[observe]``: what a run prints and writes, besides torchtitan's ``[metrics]``."""

    samples_per_step: Annotated[int, at_least(0)] = 4
    """Number of rollouts that are written to ``samples.jsonl`` in each step. With 0 no such file is
    written."""

    print_samples: Annotated[int, at_least(0)] = 0
    """Number of these rollouts that are also printed in each step, as the model saw them: with special
    tokens, turns, trained tokens, advantage and rewards. At most ``samples_per_step``."""

    equal_rewards_steps: Annotated[int, at_least(1).or_value(0, "off")] = 5
    """Number of steps in a row without two different rewards in any group after which a notice says
    that nothing is learned, with the likely causes. Further notices follow after twice as many steps
    each."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown: a live ``bar``, a line for each step (``lines``), or nothing.
    ``auto`` shows the bar on a terminal and lines elsewhere."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Lowest level of log messages that rank 0 prints. Other ranks print warnings and errors
    only."""
