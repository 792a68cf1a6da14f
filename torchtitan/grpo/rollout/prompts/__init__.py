# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prompt sets as one endless, shuffled and resumable stream of tokenized prompts.

In reading order: `prompt_set` (the rows of a table as prompts), `row_check` with `checked_rows`,
`mixture` (several sets), `interleaving` and `epoch_order` (which set and row each index refers to),
and `prompt_stream`.
"""

from torchtitan.grpo.rollout.prompts.checked_rows import CheckedRows
from torchtitan.grpo.rollout.prompts.mixture import PromptMixture, open_mixture
from torchtitan.grpo.rollout.prompts.prompt_set import PromptLimits, PromptSet, first_prompts
from torchtitan.grpo.rollout.prompts.prompt_stream import PromptStream
from torchtitan.grpo.rollout.prompts.row_check import check_rows

__all__ = [
    "CheckedRows",
    "PromptLimits",
    "PromptMixture",
    "PromptSet",
    "PromptStream",
    "check_rows",
    "first_prompts",
    "open_mixture",
]
