# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run may ask of its teacher stays within what servers return."""

from torchtitan.grpo.config.teacher import MAX_TOP_K
from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.rollout.teachers.teacher_check import MOST_FURTHER_TOKENS


def test_a_teacher_is_asked_for_at_most_as_many_tokens_as_servers_return() -> None:
    """A teacher with further tokens is asked for them besides ``teacher.top_k``."""
    assert MAX_TOP_K + MOST_FURTHER_TOKENS <= MAX_TOP_TOKENS
