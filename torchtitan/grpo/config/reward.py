# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[reward]`` table: how completions are scored."""

from dataclasses import dataclass, field
from typing import Annotated

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Reward:
    """``[reward]``: how completions are scored."""

    functions: list[str] = field(default_factory=list)
    """Reward functions; at least one is required, unless the run uses a teacher, replays
    recorded rollouts, or trains on supervised examples. Each is named
    ``package.module:function`` or ``path/to/file.py:function``, or is built in: ``exact_match``,
    ``partial_match``, ``boxed_math``, ``think_answer_tags``, or ``environment`` (the reward that
    ``rollout.environment`` returned)."""

    weights: list[float] = field(default_factory=list)
    """Weight of each function in the sum that is the reward. If it is empty, each function has
    weight 1."""

    num_workers: Annotated[int, at_least(1)] = 1
    """Number of processes that score completions."""

    timeout_seconds: Annotated[float, above(0)] = 30.0
    """Maximum time for scoring one group. After this time, the worker is killed and the group
    counts as unscored. Importing the functions may take ten times as long."""

    max_consecutive_failures: Annotated[int, at_least(1)] = 8
    """The run ends with an error after this many groups in a row could not be scored."""
