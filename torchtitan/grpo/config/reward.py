# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[reward]`` table: how completions are scored."""

from dataclasses import dataclass, field


@dataclass
class Reward:
    """``[reward]``: scoring."""

    functions: list[str] = field(default_factory=list)
    """Reward functions as dotted paths, ``package.module:function`` or
    ``path/to/file.py:function``; a bare name is a built-in one: ``exact_match``,
    ``partial_match``, ``boxed_math``, ``think_answer_tags``, ``environment`` (what
    ``rollout.environment`` gave). At least one."""

    weights: list[float] = field(default_factory=list)
    """One weight a function; empty is 1.0 each."""

    num_workers: int = 1
    """Processes that score, at least 1."""

    timeout_seconds: float = 30.0
    """A worker that takes longer for one group is killed; the group is then unscored. To
    import the functions it may take ten times as long."""

    max_consecutive_failures: int = 8
    """The run stops after this many groups in a row could not be scored."""
