# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prompt sets as one endless, shuffled and resumable stream of tokenized prompts.

In reading order: `prompt_set` (the rows of a table as prompts), `row_check` (checks rows before training),
`mixture` (which of several sets each prompt is drawn from), and `prompt_stream` (which row is drawn).
"""

from torchtitan.grpo.rollout.prompts.mixture import open_sets
from torchtitan.grpo.rollout.prompts.prompt_set import CheckedRows, PromptLimits, PromptSet
from torchtitan.grpo.rollout.prompts.prompt_stream import PromptStream
from torchtitan.grpo.rollout.prompts.row_check import check_rows, first_prompts

__all__ = [
    "CheckedRows",
    "PromptLimits",
    "PromptSet",
    "PromptStream",
    "check_rows",
    "first_prompts",
    "open_sets",
]
