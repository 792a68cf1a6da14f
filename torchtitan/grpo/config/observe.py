# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[observe]`` table: what a run prints and writes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


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

    monitor: bool = True
    """Serve ``/healthz`` and ``/metrics`` (Prometheus) of rank 0 and of the rollout process. Their
    addresses are in ``<dump_folder>/monitoring``; docs/how-to/monitor.md explains them."""

    monitor_host: str = "127.0.0.1"
    """Address on which both listen. Another one than a loopback address needs a key in the environment
    variable ``TORCHTITAN_GRPO_MONITOR_KEY``, which clients send as ``Authorization: Bearer KEY``."""

    monitor_port: Annotated[int, at_least(1).at_most(65534).or_value(0, "free ports")] = 0
    """Port of rank 0. The rollout process takes the next one."""

    stuck_seconds: Annotated[float, above(0)] = 600.0
    """``/healthz`` answers 503 if a phase of rank 0 lasts longer than this and than three times the
    longest such phase before, or if the rollout process has had no server, or has finished nothing
    for a batch that rank 0 waits for, for so long."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown: a live ``bar``, a line for each step (``lines``), or nothing.
    ``auto`` shows the bar on a terminal and lines elsewhere."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Lowest level of log messages that rank 0 prints. Other ranks print warnings and errors
    only."""
