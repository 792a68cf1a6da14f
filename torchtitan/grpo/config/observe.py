# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[observe]`` table: what a run prints and writes."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class Observe:
    """``[observe]``: what a run leaves behind, besides torchtitan's ``[metrics]``."""

    samples_per_step: int = 4
    """Rollouts written to ``samples.jsonl`` each step; 0 writes none."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Live line (``bar``), a line a step (``lines``). ``auto``: bar on a terminal."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """What of torchtitan's own log rank 0 prints; other ranks print warnings only."""
