# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[sft]`` table: supervised training on given completions."""

from dataclasses import dataclass
from typing import Annotated

from torchtitan.grpo.config.bounds import at_least


@dataclass
class SFT:
    """``[sft]``: supervised training on given completions, instead of on rollouts.

    A run with ``path`` learns to generate these completions. It has no servers, rewards or
    rollouts. Model, layout, optimizer, checkpoints and exports are the same as in any other run,
    and GRPO can start from its export. docs/how-to/supervised-start.md shows both runs.
    """

    path: str | None = None
    """Training examples: a ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging
    Face data set (``prompts.name``, ``prompts.split``). With None, the run trains on rollouts."""

    column: str = "prompt"
    """Column that holds the prompt: a string, to which ``prompts.template`` is applied, or a list
    of chat messages, to which the chat template with ``prompts.system_prompt`` and
    ``prompts.chat_template_kwargs`` is applied. If the last message is from the assistant, it is
    the completion, so that ``messages`` can name a column of whole conversations."""

    completion_column: str = "completion"
    """Column that holds the completion: a string, or a list with one assistant message. It is not
    read if ``column`` already contains the completion. The completion is tokenized separately, as a
    continuation of the prompt, and an end-of-sequence token is appended unless it ends with one."""

    examples_per_step: Annotated[int, at_least(1)] = 32
    """Number of examples in one step, at least ``grpo.num_minibatches``. The loss is the mean
    negative log-likelihood of their completion tokens."""

    max_example_tokens: Annotated[int, at_least(1).or_value(0, "training.seq_len")] = 0
    """Maximum length of an example, in tokens, including prompt and completion. Longer examples are
    left out and counted."""

    held_out_path: str | None = None
    """Held-out examples, in the form of ``path``. Their loss is computed before the first step and
    after the last one. With None, no held-out loss is computed."""

    held_out_interval: Annotated[int, at_least(1).or_value(0, "only at the start and the end")] = 0
    """Number of steps between two computations of the held-out loss."""
