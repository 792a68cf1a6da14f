# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[sft]`` table: supervised training on given completions."""

from dataclasses import dataclass
from typing import Annotated

from torchtitan.grpo.config.bounds import at_least


@dataclass
class SFT:
    """``[sft]``: supervised training on given completions, in place of rollouts.

    A run with ``path`` learns to write these completions. It has no servers, rewards and rollouts;
    model, layout, optimizer, checkpoints and export are those of any run, and GRPO can begin with what
    it exports. docs/how-to/supervised-start.md shows both runs.
    """

    path: str | None = None
    """The examples: a ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging Face data
    set (``prompts.name``, ``prompts.split``). None trains on rollouts."""

    column: str = "prompt"
    """Column that holds the prompt: a string, to which ``prompts.template`` is applied, or a list of chat
    messages, to which the chat template with ``prompts.system_prompt`` and
    ``prompts.chat_template_kwargs`` is applied. Of messages that end with one of the assistant, this
    last message is the completion, so that ``messages`` names whole conversations."""

    completion_column: str = "completion"
    """Column that holds the completion: a string, or a list with one message of the assistant. Not read
    where ``column`` ends with the completion. It is tokenised by itself, as a continuation of the
    prompt, and the end-of-sequence token follows it unless it is there."""

    examples_per_step: Annotated[int, at_least(1)] = 32
    """Number of examples in one step, at least one for each of ``grpo.num_minibatches``. The loss is the
    mean negative log-likelihood of their completion tokens."""

    max_example_tokens: Annotated[int, at_least(1).or_value(0, "training.seq_len")] = 0
    """Length, in tokens, above which examples are left out, prompt and completion together. The run
    counts them."""

    held_out_path: str | None = None
    """Held-out examples, in the form of ``path``. Their loss is computed before the first step and after
    the last one. None computes nothing."""

    held_out_interval: Annotated[int, at_least(1).or_value(0, "only at the ends")] = 0
    """Number of steps between two computations of the held-out loss."""
