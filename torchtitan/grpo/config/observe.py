# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[observe]`` table: what a run prints and writes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Observe:
    """``[observe]``: what a run prints and writes, in addition to torchtitan's ``[metrics]``."""

    samples_per_step: Annotated[int, at_least(0)] = 4
    """Number of rollouts that are written to ``samples.jsonl`` in each step. With 0, the file is
    not written."""

    print_samples: Annotated[int, at_least(0)] = 0
    """Number of the rollouts of ``samples.jsonl`` that are also printed in each step as the model
    saw them, with special tokens, turns, trained tokens, advantage and rewards. At most
    ``samples_per_step``."""

    equal_rewards_steps: Annotated[int, at_least(1).or_value(0, "off")] = 5
    """Number of steps in a row without two different rewards in any group after which a warning
    reports that nothing is learned, with the likely causes. The number of steps doubles for each
    further warning."""

    monitor: bool = True
    """Serve ``/healthz`` and ``/metrics`` (Prometheus) on rank 0 and in the rollout process. Their
    addresses are written to ``<dump_folder>/monitoring``; docs/how-to/monitor.md describes them."""

    monitor_host: str = "127.0.0.1"
    """Address on which ``/healthz`` and ``/metrics`` are served. An address other than loopback
    needs a key in the environment variable ``TORCHTITAN_GRPO_MONITOR_KEY``, which clients send as
    ``Authorization: Bearer KEY``."""

    monitor_port: Annotated[int, at_least(1).at_most(65534).or_value(0, "free ports")] = 0
    """Port of ``/healthz`` and ``/metrics`` on rank 0. The rollout process uses the next port."""

    stuck_seconds: Annotated[float, above(0)] = 600.0
    """Time without progress after which ``/healthz`` responds with 503. On rank 0, this happens if
    a phase takes longer than this and longer than three times the longest earlier phase of the same
    kind. In the rollout process, it happens if for this time no server could accept requests, or
    rank 0 has waited for a batch and no completion has finished."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown: a live ``bar``, a line for each step (``lines``), or nothing.
    ``auto`` shows the bar on a terminal and lines elsewhere."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Minimum level of the log messages that rank 0 prints. Other ranks only print warnings and
    errors."""
